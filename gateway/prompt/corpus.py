"""Texts on which a fast encoder must equal the reference before it is used.

Chosen for where encoders have been seen to differ: boundaries of splits, normalisation, special
tokens inside words, runs, and letters newer than an encoder's Unicode tables.
"""

from collections.abc import Sequence
from typing import Final

PROSE: Final = (
    "It was past nine when the ferry came in; nobody was waiting. She'd said 'I'll be there', and "
    "they'd believed her, as one does. THEY'RE LATE, HE'S GONE, WE'VE LOST IT, I'M SURE.\n\n"
    "\u201cWell,\u201d said the captain \u2014 an old man of 73\u00bd \u2014 \u201cit\u2019s 3,141.59 km to go\u2026\u201d\n"
    "  1. Preheat the oven to 180 \u00b0C (356\u00b0F).\n  2. Mix 250g flour, 2 eggs & a pinch of salt!\n"
    "Na\u00efve caf\u00e9s \u00e0 la carte; \u00dcbergr\u00f6\u00dfe, \u0141\u00f3d\u017a, \u0130stanbul, \u0434\u043e\u0431\u0440\u044b\u0439 \u0434\u0435\u043d\u044c, \u03ba\u03b1\u03bb\u03b7\u03bc\u03ad\u03c1\u03b1.\n"
)
CODE: Final = (
    "def parse(self, line: str) -> dict[str, int]:\n"
    '    """Return counts; raises ValueError."""\n'
    "    out = {}\n    for i, ch in enumerate(line.split(',')):\n"
    "        if ch != '' and not ch.startswith(('#', '//')):\n"
    "            out[ch] = out.get(ch, 0) + 0x1F * (i ** 2) // 3  # TODO: fix\n"
    '    return out\n\n\n\tif (a&&b||!c) { x->y = z[0]; printf("%5.2f\\n", d); }\r\n'
    "SELECT * FROM t WHERE id IN (1,22,333,4444,55555) AND name LIKE '%o''b%';\r\n"
    '{"key":[1,2.5e-10,null,true],"nested":{"a":"\\u00e9\\n"}}\n<div class="x">&nbsp;</div>\n'
)
SCRIPTS: Final = (
    "\u65e5\u672c\u8a9e\u306e\u30c6\u30ad\u30b9\u30c8\u3067\u3059\u3002\u6771\u4eac\u90fd\u3001\uff11\uff12\uff13\u5186\uff01\u4f60\u597d\uff0c\u4e16\u754c\u3002\ud55c\uad6d\uc5b4 \ubb38\uc7a5\uc785\ub2c8\ub2e4.",
    "\u0645\u0631\u062d\u0628\u0627 \u0628\u0627\u0644\u0639\u0627\u0644\u0645 \u0661\u0662\u0663 \u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd \u0939\u093f\u0928\u094d\u0926\u0940 \u0915\u094d\u0937 \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35\u0e0a\u0e32\u0e27\u0e42\u0e25\u0e01 \u0bb5\u0ba3\u0b95\u0bcd\u0b95\u0bae\u0bcd",
    "\u1112\u1161\u11ab\u1100\u1173\u11af \ud55c\uae00 \u3131 \uff76\uff9e \u30ac \u304b\u3099",
)
EMOJI: Final = (
    "\U0001f642\U0001f469\u200d\U0001f467\U0001f3fd \U0001f1e9\U0001f1ea\u2764\ufe0f ok\U0001f44d\U0001f3fe\U0001f680\U0001f680 #\ufe0f\u20e3 \u2714\ufe0e"
    " \U0001f3f4\U000e0067\U000e0062\U000e0065\U000e006e\U000e0067\U000e007f \U0001fae8 \U0001fac6"
)
MARKS: Final = (
    "e\u0301 \u00e9 e\u0327\u0301 a\u0308\u0323 \u0301\u0301 lone\u0338 x\u0338= =\u0338 <\u0338 >\u0338 \u2126\u212b\u212a \ufb01\ufb03 \u017f\u0323\u0307",
    "\u0958\u0915\u093c \u09cb\u09c7\u09be \u0f43 \u2adc \U0001d15e \ufb1d \u0344 \u1e9b\u0323",
    "\u0301start",
    "\u200d\u200b\u2060\ufeffzero",
    "\u0000\u0001\u001b[0m\u007f\u0085\u009f\ufffd\ufffe\U0010ffff",
)
SPACE: Final = (
    "a  b   c    d\t\te\n\n\nf\r\n\r\ng \n \n h\u00a0i\u2003j\u3000k\u2028l\u2029m\u0085n\u000bo\u000cp\u180eq",
    "   lead",
    "trail   ",
    " ",
    "  ",
    "\n",
    "\r",
    "\t",
    " \n",
    "\n ",
    "   \n\n   \t x",
    "x \r\n y",
    "'s 't'",
    " 's",
    "''s's",
)
RECENT: Final = (
    "\U0001df00\U0002ebf0\U00031350\U00010d40\U0001e5d0\U00016d40\U00010570\u08b5\u1c89\ua7cb\u2c2f"
)
"""Letters and digits of Unicode 14 to 16."""

_RUN: Final = 2_000


def runs() -> list[str]:
    """Return long repeats: where regexes backtrack and merges pile up."""
    units = (
        " ",
        "\n",
        "\t",
        "\r\n",
        "a",
        "A",
        "0",
        "-",
        "=",
        "_",
        "ab",
        "\u65e5",
        "\u0301",
        "\U0001f600",
        " a",
        "\n ",
        "'s",
    )
    return [unit * (_RUN // len(unit)) + tail for unit in units for tail in ("", "x")]


def samples(added: Sequence[str], words: Sequence[str]) -> dict[str, list[str]]:
    """Return name -> texts. `added` are the tokenizer's added tokens, `words` of its vocabulary."""
    plain = [PROSE, CODE, *SCRIPTS, EMOJI, *MARKS, *SPACE, RECENT]
    return {
        "prose": [PROSE, PROSE.upper(), PROSE.replace(" ", "")],
        "code": [CODE, CODE.replace("    ", "\t"), CODE.replace("\n", "\r\n")],
        "scripts": list(SCRIPTS),
        "emoji": [EMOJI],
        "combining marks": list(MARKS),
        "white space": list(SPACE),
        "recent letters": [RECENT, *RECENT, *(f"a{letter}1 {letter}" for letter in RECENT)],
        "every low character": ["".join(map(chr, range(0x3000))), *map(chr, range(0x250))],
        "runs": runs(),
        "special tokens": _around(added, plain),
        "vocabulary": [*words, *(" ".join(words[at : at + 64]) for at in range(0, len(words), 64))],
        "all": ["".join(plain), "\n".join(reversed(plain))],
    }


def _around(added: Sequence[str], plain: Sequence[str]) -> list[str]:
    """Return texts with special tokens beside, inside and broken by other text."""
    some = [*added[:24], *added[-8:]]
    texts: list[str] = list(added[:512])
    for token in some:
        texts += [
            f"a{token}b",
            f" {token} ",
            f"{token}\u0338x",
            f"e{token}\u0301",
            f"\n{token}\n{token}",
        ]
        texts += [token[:-1], token[1:], token[:-1] + token, token.upper(), f"x{token[:2]}{token}"]
    texts += [token.join(plain) for token in some[:4]]
    return texts
