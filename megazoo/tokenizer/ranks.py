"""LLaMA-3's tokenizer.model: one line `base64 rank` per token of a byte-level BPE."""

import base64
import re
from pathlib import Path

from megazoo.errors import UserError
from megazoo.files import malformed
from megazoo.tokenizer.added import AddedToken
from megazoo.tokenizer.byte_bpe import LLAMA3_PATTERN, ByteLevelBPE
from megazoo.tokenizer.settings import TokenizerSettings

LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?(\n|\Z)")
NAMED = {
    0: "begin_of_text",
    1: "end_of_text",
    4: "finetune_right_pad_id",
    6: "start_header_id",
    7: "end_header_id",
    8: "eom_id",
    9: "eot_id",
    10: "python_tag",
}
SPECIAL = 256  # named and reserved tokens after the ranks


def special_tokens(first: int) -> list[AddedToken]:
    """Return the special tokens of LLaMA-3.1, with ids from `first` on."""
    reserved = (f"reserved_special_token_{i}" for i in range(SPECIAL))
    names = (NAMED.get(place) or next(reserved) for place in range(SPECIAL))
    return [AddedToken(f"<|{name}|>", first + place) for place, name in enumerate(names)]


def from_ranks(path: Path, data: bytes, settings: TokenizerSettings) -> ByteLevelBPE:
    """Create the tokenizer of a file of ranks with the content `data`. Ranks are used as ids; bos
    is added before a text."""
    tokens = {}
    with malformed(path):
        for line in data.splitlines():
            if line:
                token, rank = line.split()
                tokens[int(rank)] = base64.b64decode(token, validate=True)
    if sorted(tokens) != list(range(len(tokens))) or len(set(tokens.values())) < len(tokens):
        raise UserError(f"{path} is malformed: its ranks are not 0, 1, 2 ... of different tokens")
    contents = {token: rank for rank, token in tokens.items()}
    found = [] if settings.added else special_tokens(len(tokens))
    added = settings.all_added(found, lambda name: contents.get(name.encode()))
    ids = {token.content: token.id for token in added}
    tokenizer = ByteLevelBPE(tokens, sorted(tokens), LLAMA3_PATTERN, added)
    # Meta's code for these files names the first two special tokens bos and eos.
    own = {} if settings.added else {"bos": len(tokens), "eos": len(tokens) + 1}
    return settings.apply(tokenizer, ids.get, own, add_bos=True)
