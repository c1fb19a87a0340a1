"""Every recipe of CONTRIBUTING.md works as it is written, and none of its edits can be left out."""

from __future__ import annotations

import pytest

from tests.contributing.recipes import PAGE, recipes, run, scratch_copy

RECIPES = recipes()


def test_the_page_has_a_recipe_for_everything_that_people_add():
    assert [title.split(maxsplit=2)[2] for title in RECIPES] == [
        "op", "algorithm that splits an op along a dim", "pipeline schedule", "device to the catalogue", "optimizer",
    ]  # fmt: skip
    assert all(recipe.edits and recipe.commands for recipe in RECIPES.values())


@pytest.mark.timeout(900)
@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_works(title, tmp_path):
    root = scratch_copy(tmp_path)
    for edit in RECIPES[title].edits:
        edit.apply(root)
    for command in RECIPES[title].commands:
        result = run(command, root)
        assert result.returncode == 0, f"{PAGE.name}, {title}: {command}\n{result.stdout}\n{result.stderr}"
