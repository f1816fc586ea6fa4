"""The lists of families, which are made from the files of megazoo/models/."""

from tests.docs.refresh_docs import README, TABLE, family_file, models_of_readme


def test_the_table_and_the_readme_list_every_family():
    assert TABLE.read_text() == family_file(), "python -m tests.docs.refresh_docs"
    assert README.read_text() == models_of_readme(README.read_text())
