"""The lists of families, which are made from the files of megazoo/models/."""

import transformers

from megazoo.families.registry import FAMILIES
from megazoo.formats.hugging_face.export import hugging_face_config
from tests.docs.refresh_docs import (
    README,
    TABLE,
    family_file,
    models_of_readme,
)


def test_the_table_and_the_readme_list_every_family():
    assert TABLE.read_text() == family_file(), "python -m tests.docs.refresh_docs"
    assert README.read_text() == models_of_readme(README.read_text())


def test_the_classes_of_exports_are_those_of_transformers():
    for name, model in FAMILIES.items():
        (written,) = hugging_face_config(model.presets[f"{name}-tiny"])["architectures"]
        assert hasattr(transformers, written), name
