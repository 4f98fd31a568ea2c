"""The little languages inside options."""

import pytest

from xmac_cli.cli.errors import UsageError
from xmac_cli.prune_moe.option_texts import parse_layers, parse_protected, parse_share, parse_temper


def test_what_they_mean():
    assert parse_protected(["3:17", "4:2,4:3"]) == {(3, 17), (4, 2), (4, 3)}
    assert parse_protected([]) == set()
    assert parse_layers("0-3,7") == {0, 1, 2, 3, 7} and parse_layers(None) is None
    assert parse_share("2/4") == (2, 4) and parse_share(None) is None
    assert parse_temper("auto") == "auto" and parse_temper("0.5") == 0.5


@pytest.mark.parametrize(
    ("parse", "text"),
    [
        (lambda t: parse_protected([t]), "3"),
        (lambda t: parse_protected([t]), "3:x"),
        (lambda t: parse_protected([t]), "-1:2"),
        (parse_layers, "5-2"),
        (parse_layers, "a"),
        (parse_layers, ""),
        (parse_layers, "0-99999999999"),
        (parse_share, "0/4"),
        (parse_share, "5/4"),
        (parse_share, "1"),
        (parse_temper, "nan"),
        (parse_temper, "-1"),
        (parse_temper, "inf"),
        (parse_temper, "hot"),
    ],
)
def test_what_they_refuse(parse, text):
    with pytest.raises(UsageError):
        parse(text)
