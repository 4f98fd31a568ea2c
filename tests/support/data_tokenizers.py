"""A character tokenizer whose ids can be checked by eye, as a real transformers tokenizer."""

from __future__ import annotations

from typing import Any

CHARACTERS = "abcdefghijklmnopqrstuvwxyz .\n<>|_:"


def character_tokenizer(*, chat_template: str | None = None, bos: bool = False) -> Any:
    """Ids: 0 end-of-text, 1 padding, 2 beginning-of-text, 3 + i for CHARACTERS[i]."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<eos>", "<pad>", "<bos>"]
    vocabulary = {token: i for i, token in enumerate([*special, *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 2)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<eos>",
        pad_token="<pad>",
        bos_token="<bos>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )


def ids_of(text: str) -> list[int]:
    """Token ids of plain text."""
    return [3 + CHARACTERS.index(character) for character in text]
