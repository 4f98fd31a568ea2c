"""A byte-level BPE tokenizer, trained on the fly (Sennrich et al., arXiv 1508.07909; bytes as in GPT-2).

Training is deterministic: ties between merges are broken by token id, not by hash order.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

END_OF_TEXT, PADDING, TURN_START, TURN_END = "<|endoftext|>", "<|pad|>", "<|im_start|>", "<|im_end|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def train_tokenizer(
    documents: Mapping[str, Iterable[str]], vocabulary: int, bytes_per_domain: int, max_length: int
) -> Any:
    """Train a tokenizer on equal amounts of text per domain.

    Args:
        documents: texts per domain.
        vocabulary: number of tokens, four special ones included.
        bytes_per_domain: text taken from each domain.
        max_length: longest input of the model it is for.

    Returns:
        a transformers fast tokenizer with end-of-text, padding and ChatML tokens and a chat template.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_TEXT, PADDING, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_equal_share(documents, bytes_per_domain), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=PADDING,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )


def _equal_share(documents: Mapping[str, Iterable[str]], limit: int) -> Iterator[str]:
    for texts in documents.values():
        used = 0
        for text in texts:
            if used >= limit:
                break
            used += len(text.encode())
            yield text
