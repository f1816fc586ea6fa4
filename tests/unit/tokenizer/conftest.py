import pytest

from tests.support.tokenizer_files import write_tokenizers


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """A directory with a tokenizer of each form."""
    return write_tokenizers(tmp_path_factory.mktemp("tokenizers"))
