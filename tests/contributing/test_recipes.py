"""Every recipe of CONTRIBUTING.md works as it is written, and so does what it says about debugging."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.contributing.recipes import PAGE, debugging, recipes, run, scratch_copy

RECIPES = recipes()


def test_the_page_has_a_recipe_for_everything_that_people_add():
    assert [title.split(maxsplit=2)[2] for title in RECIPES] == [
        "op", "algorithm that splits an op along a dim", "pipeline schedule", "kind of storage",
        "device to the catalogue", "optimizer",
    ]  # fmt: skip
    assert all(recipe.edits and recipe.commands for recipe in RECIPES.values())


def test_the_way_to_debug_prints_every_step(capsys):
    namespace: dict[str, object] = {}
    for block in debugging():
        exec(compile(block, PAGE.name, "exec"), namespace)
    printed = capsys.readouterr().out
    for line in ("graph Sequential (train)", "ma k+ ~1, n k+ ~2 -> ma n", '"tp=2"', "-- place: layouts and reshards",
                 "-- overlap: "):  # fmt: skip
        assert line in printed


@pytest.mark.timeout(900)
@pytest.mark.parametrize("title", RECIPES)
def test_a_recipe_works(title, tmp_path):
    root = scratch_copy(tmp_path)
    for edit in RECIPES[title].edits:
        edit.apply(root)
    for command in RECIPES[title].commands:
        result = run(command, root)
        assert result.returncode == 0, f"{PAGE.name}, {title}: {command}\n{result.stdout}\n{result.stderr}"


def test_an_algorithm_that_is_never_called_is_refused(tmp_path):
    root, recipe = scratch_copy(tmp_path), RECIPES["Add an algorithm that splits an op along a dim"]
    for edit in recipe.edits:
        replace(edit, text=edit.text.replace("localize=local_vector_norm, ", "")).apply(root)

    result = run(f"{recipe.commands[0]} -x", root)

    assert result.returncode != 0 and "no localize that calls the algorithm" in result.stdout
