import os
import shutil
import signal
import tempfile
import textwrap
from pathlib import Path

# several tests run side by side: threads would wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

from megazoo.testing import RankPool
from megazoo.testing.ranks import PRELOADED
from tests.support import budget
from tests.support.sampling import in_shard, shard_of

# Modules that tests import and that take seconds to load: the server of ranks loads them once.
PRELOADED += ["pytest", "megazoo.pretrain", "lm_eval.evaluator", "peft", "torch._inductor"]
PRELOADED += [
    f"transformers.models.{name}.modeling_{name}" for name in ("auto", "gpt2", "llama", "mpt")
]
PRELOADED += ["tests.layouts.test_layouts", "tests.support.warm"]


def pytest_configure(config):
    """Keep the files of Hugging Face's libraries, which read this when they are imported, out of
    the user's own directory, and the libraries off the network. Programs that tests start inherit
    the signals that are ignored here: none, also under nohup and in the background."""
    if config.option.shard:
        shard_of(config.option.shard)  # raises before tests are collected
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # a worker has it from who started it
        config.files_of_workers = tempfile.mkdtemp(prefix="megazoo-tests-")
        os.environ["MEGAZOO_TEST_FILES"] = os.environ["HF_HOME"] = config.files_of_workers
        os.environ["HF_DATASETS_OFFLINE"] = os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_unconfigure(config):
    shutil.rmtree(getattr(config, "files_of_workers", ""), ignore_errors=True)


def pytest_addoption(parser):
    group = parser.getgroup("megazoo")
    group.addoption("--shard", help="run one shard of the tests: 3/8 is the third of eight")
    group.addoption("--record-durations", type=Path, help="write the seconds per folder to a file")


def pytest_collection_modifyitems(config, items):
    """Keep the tests of one shard."""
    if config.option.shard:
        items[:], others = in_shard(list(items), config.option.shard)
        config.hook.pytest_deselected(items=others)


def pytest_collection_finish():
    import tests.support.warm  # noqa: F401 (which freezes what was imported so far)


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter, config):
    """Print the seconds of each folder of tests, of all workers together."""
    if "PYTEST_XDIST_WORKER" in os.environ:  # which knows only its own tests
        return
    reports = [report for found in terminalreporter.stats.values() for report in found]
    seconds, tests = budget.by_folder(reports)
    if tests:
        terminalreporter.section("worker seconds by folder")
        for line in budget.table(seconds, tests, budget.recorded()):
            terminalreporter.line(line)
    if config.option.record_durations:
        budget.record(seconds, tests, config.option.record_durations)


@pytest.fixture(scope="session")
def ranks():
    """Runs a function on a number of ranks: ranks(function, world_size, *args)."""
    pool = RankPool()
    yield pool.run
    pool.close()


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tokenizer():
    """A byte-level BPE tokenizer of 300 tokens, trained on a file of the standard library."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train(
        [textwrap.__file__],
        trainers.BpeTrainer(vocab_size=300, special_tokens=special, initial_alphabet=alphabet),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    )
