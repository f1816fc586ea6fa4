"""Kinds of the fuzzer: JSONL files, Hugging Face directories, and the headers of tensors and of
token files."""

import gzip
import json
import random
import shutil
import struct
import zlib
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
import zstandard

from megazoo.checkpoint.tensor_files import TensorFiles
from megazoo.data import encoding, preprocess
from megazoo.data.cache import cached_tokens
from megazoo.data.conversations import CHATML
from megazoo.data.indexed import IndexedTokens, write_index
from megazoo.formats.hugging_face.directory import HuggingFaceDirectory
from megazoo.generate.settings import GenerationSettings
from megazoo.models.pretrained import from_pretrained
from megazoo.tokenizer import open_tokenizer
from tests.support.fuzz.cases import damaged, deep, mutated, refusal
from tests.support.tokenizer_files import train
from tests.support.transformers_models import gpt2, llama, mpt

EOD = 256
OBJECTS = [
    {"text": "one"}, {"text": "é☃🙂"}, {"text": ""}, {"text": "a\nb\0c", "more": [1, {"x": None}]},
    {"text": " x " * 30}, {"prompt": "a", "completion": "b"},
    {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
]  # fmt: skip
RAW_LINES = [
    b'{"text": "\\ud800"}', b'{"text": "\\ud83d\\ude42"}', b'{"text": "\xed\xa0\x80"}',
    b'\xef\xbb\xbf{"text": "bom"}', b'{"text": "cr"}\r', b"\r", b" ", b"null", b"[]", b'"text"',
    b'{"text": "a", "text": "b"}', b'{"text": NaN}', b'{"x": NaN, "text": "n"}', b"{}", b'{"text"',
    b'{"x": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", b"{" * 3000, b"1", b"\xff\xfe{",
    b'{"x": ' + b"9" * 5000 + b', "text": "d"}', b'{"text": "' + b"long " * 50_000 + b'"}',
    b'{"text": ["a"]}', b'{"text": 3}', b'{"text": null}', b'{"text": "a\tb"}',
    b'{"text": "nul\0"}', b'{"text": "a"} {"text": "b"}', b'{"text": "sep\xe2\x80\xa8"}',
    '{"text": "utf-16"}'.encode("utf-16"), '{"text": "le"}'.encode("utf-16-le"),
]  # fmt: skip


class Jsonl:
    """JSONL files. Their tokens are those of the lines that the json module reads, one by one."""

    def __init__(self, directory: Path):
        pass

    def __call__(self, chance: random.Random, directory: Path) -> None:
        lines = [self.line(chance) for _ in range(chance.choice((0, 1, 3, 10, 40)))]
        data = b"\n".join(lines) + chance.choice((b"", b"\n"))
        if chance.random() < 0.2:
            data = damaged(data, chance)
        suffix = chance.choice(["", "", ".gz", ".zst"])
        packed = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}[suffix](data)
        whole = True
        if suffix and chance.random() < 0.5:
            packed = damaged(packed, chance) if chance.random() < 0.5 else packed[:-1]
            packed = packed if chance.random() < 0.9 else b""
            data, whole = unpacked(packed, suffix)
        file = directory / f"a.jsonl{suffix}"
        file.write_bytes(packed)
        documents, bad = by_hand(data)
        preprocess.CHUNK = chance.choice((1, 7, 100, 1 << 20))  # in this child alone
        self.check_preprocessed(file, documents, bad, whole)
        first = next(filter(bytes.strip, data.split(b"\n")), b"")
        chats = b"messages" in first or b"prompt" in first
        self.check_cached(file, documents, bad, whole, chats)

    def line(self, chance: random.Random) -> bytes:
        kind = chance.random()
        if kind < 0.6:
            return json.dumps(chance.choice(OBJECTS[:5])).encode()
        if kind < 0.7:
            return chance.choice(RAW_LINES)
        if kind < 0.8:
            return json.dumps({"text": deep(chance.choice((1, 500)))}).encode()
        changed = mutated(chance.choice(OBJECTS), chance, 1)
        return json.dumps(changed, ensure_ascii=chance.random() < 0.8).encode(
            "utf-8", "surrogatepass"
        )

    def check_preprocessed(self, file: Path, documents: list, bad: list, whole: bool) -> None:
        """Compare the token files of preprocess with what was read by hand."""
        told = []
        recipe = encoding.Recipe((str(file),), "byte")
        prefix = file.parent / "out"
        done, error = refusal(preprocess.preprocess, recipe, prefix, 0, report=told.append)
        assert bool(error) != whole, f"whole: {whole}, but {error!r}"
        if error:
            assert str(file) in error, error
            return
        tokens = IndexedTokens(f"{prefix}_text_document")
        found = [bytes(tokens[i].astype(np.uint8)) for i in range(len(tokens))]
        assert found == [document for document in documents if document]
        assert [line.partition(": ")[0] for line in told] == [f"{file}, line {n}" for n in bad]
        assert (done.documents, done.bad) == (len(documents), len(bad))

    def check_cached(
        self, file: Path, documents: list, bad: list, whole: bool, chats: bool
    ) -> None:
        """Compare the tokens that training keeps with what was read by hand."""
        found, error = refusal(cached_tokens, file, "byte", CHATML)
        if error:
            assert str(file) in error, error
            if whole and documents and not chats:
                assert bad, error
                assert f", line {bad[0]}: " in error, (error, bad)
            return
        assert whole, "a part of the file was taken for all of it"
        if len(found) == 2:  # conversations, and what carries a loss in them
            ids, loss_mask = found
            assert ids.lengths.tolist() == loss_mask.lengths.tolist()
            assert all(loss_mask[i].any() for i in range(len(loss_mask)))
            return
        assert not bad, "a bad line was left out"
        assert all(found[0][i][-1] == EOD for i in range(len(found[0])))
        ours = [bytes(found[0][i][:-1].astype(np.uint8)) for i in range(len(found[0]))]
        assert ours == [document for document in documents if document]


def unpacked(packed: bytes, suffix: str) -> tuple[bytes, bool]:
    """Return what a compressed file holds, and whether it is whole."""
    try:
        if suffix == ".gz":
            return gzip.decompress(packed), True
        data, frame = b"", None
        while packed:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            data += frame.decompress(packed)
            packed, frame = (frame.unused_data, None) if frame.eof else (b"", frame)
        return data, frame is None
    except (OSError, EOFError, ValueError, zstandard.ZstdError, zlib.error):
        return b"", False


def by_hand(data: bytes) -> tuple[list[bytes], list[int]]:
    """Return the texts of the lines of JSONL, and the numbers of those without one."""
    texts, bad = [], []
    if data.strip() == b"[]":  # an array of no objects
        return texts, bad
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            texts.append(json.loads(line)["text"].encode())
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            bad.append(number)
    return texts, bad


IDS = torch.randint(0, 61, (2, 12), generator=torch.Generator().manual_seed(2))
FILES = ["config.json", "config.json", "config.json", "generation_config.json", "tokenizer.json"]
TEXT = "def naïve(x):  return [x] * 3  # 你好 <|endoftext|> I'll 1234\n"


class Configs:
    """The JSON files of a Hugging Face directory. What is accepted gives transformers' logits, or
    where transformers doesn't know the directory, those of the files as they were."""

    def __init__(self, directory: Path):
        transformers.logging.set_verbosity_error()
        self.bases, self.usual = [], {}
        for name, model in (("gpt2", gpt2()), ("llama", llama(kv_heads=2)), ("mpt", mpt())):
            model.generation_config.eos_token_id = 3
            model.save_pretrained(directory / name, max_shard_size="30KB")
            train("gpt2").save(str(directory / name / "tokenizer.json"))
            self.bases.append(directory / name)
            self.usual[name] = logits_of(directory / name)
        tokenizer = tokenizers.Tokenizer.from_file(str(directory / "gpt2" / "tokenizer.json"))
        self.ids = tokenizer.encode(TEXT, add_special_tokens=False).ids

    def __call__(self, chance: random.Random, directory: Path) -> None:
        base, copy = chance.choice(self.bases), directory / "hf"
        shutil.copytree(base, copy)
        file = copy / chance.choice([*FILES, "model.safetensors.index.json"])
        values = json.loads(file.read_text())
        changed = mutated(values, chance)
        if isinstance(values, dict) and chance.random() < 0.5:  # one field, near the top
            name = chance.choice(list(values))
            changed = {**values, name: mutated(values[name], chance, 1)}
        data = json.dumps(changed).encode()
        file.write_bytes(damaged(data, chance) if chance.random() < 0.1 else data)
        if file.name == "tokenizer.json":
            self.check_tokenizer(file)
        elif file.name == "generation_config.json":
            self.check_generation(copy)
        else:
            self.check_model(copy, *self.usual[base.name])

    def check_model(self, directory: Path, usual_config, usual: torch.Tensor) -> None:
        found, told = refusal(logits_of, directory)
        if told:
            return
        config, ours = found
        try:
            hf = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
            with torch.no_grad():
                expected = hf.eval()(input_ids=IDS).logits
        except Exception:  # transformers knows no errors of its own
            expected = usual if config == usual_config else ours
        assert ours.shape == expected.shape, f"{list(ours.shape)}, not {list(expected.shape)}"
        difference = (ours - expected).abs().max().item()
        assert torch.allclose(ours, expected, 1e-4, 1e-4, equal_nan=True), f"by {difference}"

    def check_tokenizer(self, file: Path) -> None:
        tokenizer, told = refusal(open_tokenizer, file)
        if told:
            return
        ours, told = refusal(tokenizer.encode, TEXT, add_special_tokens=False, parse_special=True)
        if not told:
            assert list(ours) in tuple(self.possible_ids(file))
            refusal(tokenizer.decode, ours)

    def possible_ids(self, file: Path):
        """Yield the ids of the file's own steps, and those of transformers' class for the
        model_type next to it, which builds some of these steps itself."""
        try:
            tokenizer = tokenizers.Tokenizer.from_file(str(file))
            yield tokenizer.encode(TEXT, add_special_tokens=False).ids
            tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent)
            yield tokenizer(TEXT, add_special_tokens=False).input_ids
        except Exception:  # of many kinds
            yield self.ids

    def check_generation(self, directory: Path) -> None:
        def settings():
            saved = HuggingFaceDirectory(directory).generation
            settings = GenerationSettings.of({}, saved)
            settings.check(61)
            return settings

        found, told = refusal(settings)
        if not told:
            for token in (*found.eos_token_id, found.padding):
                assert type(token) is int, token


@torch.no_grad()
def logits_of(directory: Path) -> tuple:
    """Return the config of what is in a directory, and the logits that megazoo computes with it."""
    model = from_pretrained(directory, dtype=torch.float32).eval()
    return model.config, model(IDS, return_logits=True).logits


class Headers:
    """Headers of safetensors, and indices of token files. What is accepted gives the values that
    the file has, read by hand, where the header says."""

    def __init__(self, directory: Path):
        llama(kv_heads=2).save_pretrained(directory / "hf")
        self.base = directory / "hf"
        raw = (self.base / "model.safetensors").read_bytes()
        (length,) = struct.unpack("<Q", raw[:8])
        self.header, self.data = json.loads(raw[8 : 8 + length]), raw[8 + length :]
        self.tokens = np.arange(1000, dtype=np.uint16)
        self.lengths = np.array([100, 0, 250, 1, 49, 600])

    def __call__(self, chance: random.Random, directory: Path) -> None:
        if chance.random() < 0.5:
            self.check_safetensors(chance, directory)
        else:
            self.check_index(chance, directory)

    def check_safetensors(self, chance: random.Random, directory: Path) -> None:
        header = mutated(self.header, chance)
        if chance.random() < 0.6:
            a, b = chance.sample([n for n in self.header if n != "__metadata__"], 2)
            part = chance.choice(["dtype", "shape", "data_offsets"])
            values = mutated(self.header[a][part], chance, 1), self.header[b][part]
            header = {**self.header, a: {**self.header[a], part: chance.choice(values)}}
        text = json.dumps(header).encode()
        text = damaged(text, chance) if chance.random() < 0.1 else text
        length = chance.choice([len(text)] * 8 + [0, 1, len(text) + 1, 2**40, 2**63, 2**64 - 1])
        data = self.data + chance.choice([b""] * 8 + [b"\0", self.data])
        data = data if chance.random() < 0.9 else data[:-1]
        shutil.copytree(self.base, directory / "hf")
        (directory / "hf" / "model.safetensors").write_bytes(
            struct.pack("<Q", length) + text + data
        )
        _, told = refusal(HuggingFaceDirectory, directory / "hf")
        found, _ = refusal(all_tensors, directory / "hf", "model.safetensors")
        if found is None:
            assert told, "the directory opens, but its file doesn't"
            return
        places = json.loads(text[:length].decode())
        for name, tensor in found.items():
            start, stop = places[name]["data_offsets"]
            assert 0 <= start <= stop <= len(data)
            assert list(tensor.shape) == places[name]["shape"]
            ours = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            assert ours == data[start:stop], f"{name} has other bytes"

    def check_index(self, chance: random.Random, directory: Path) -> None:
        prefix = directory / "t"
        write_index(f"{prefix}.idx", self.lengths, np.dtype(np.uint16))
        index = bytearray((directory / "t.idx").read_bytes())
        for _ in range(chance.choice((1, 1, 2, 4))):
            place = chance.choice([9, 17, 18, 26, *range(34, len(index), 4)])
            value = chance.choice([0, 1, 2, 5, 6, 7, 255, 2**31, 2**40, 2**63, 2**64 - 1])
            size = 1 if place == 17 else chance.choice((1, 4, 8))
            index[place : place + size] = (value % 256**size).to_bytes(size, "little")
        index = damaged(bytes(index), chance) if chance.random() < 0.3 else bytes(index)
        tokens = self.tokens.tobytes()
        tokens = tokens if chance.random() < 0.9 else tokens[: chance.randrange(2001)]
        (directory / "t.idx").write_bytes(index)
        (directory / "t.bin").write_bytes(tokens)
        read, _ = refusal(IndexedTokens, prefix)
        if read is None:
            return
        _, _, _, count, boundaries = struct.unpack("<9sQBQQ", index[:34])
        code = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}[index[17]]
        lengths = np.frombuffer(index, "<i4", count, 34)
        offsets = np.frombuffer(index, "<i8", count, 34 + 4 * count)
        for number in range(count):
            found, _ = refusal(read.__getitem__, number)
            if found is not None:
                start, size = int(offsets[number]), int(lengths[number]) * np.dtype(code).itemsize
                assert start >= 0, start
                assert found.tobytes() == tokens[start : start + size]
                assert len(found) == lengths[number]
        for first in range(boundaries - 1):
            stream, _ = refusal(read.stream, first, boundaries - 1)
            if stream is not None:
                refusal(stream.__getitem__, slice(0, len(stream)))


def all_tensors(directory: Path, name: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a file, as megazoo reads them."""
    files, found = TensorFiles(directory), {}
    for tensor in files.names(name):
        shape = files.shape(name, tensor)
        found[tensor] = files.box(name, tensor, shape, tuple((0, size) for size in shape))
    return found
