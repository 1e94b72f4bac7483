"""The README of model_repository/."""

from pathlib import Path

from furcate.model_repository.document import document


def test_readme_is_what_the_tables_say() -> None:
    readme = Path(__file__).parents[2] / "model_repository/README.md"
    assert readme.read_text() == document(), (
        "run: python -m furcate.model_repository.document > model_repository/README.md"
    )
