from __future__ import annotations

import fnmatch

from hypothesis import given, settings
from hypothesis import strategies as st

from mixle.data.teacher.globs import Globs


@given(pattern=st.text("ab*?", max_size=8), model_id=st.text("ab\n", max_size=8))
@settings(max_examples=1_000, deadline=None)
def test_stars_and_question_marks_match_as_in_a_shell(pattern, model_id):
    assert Globs([pattern]).match(model_id) == fnmatch.fnmatchcase(model_id, pattern)


def test_everything_else_is_itself():
    assert Globs(["gpt[12].+(x)$"]).match("gpt[12].+(x)$")
    assert not Globs(["gpt[12]"]).match("gpt1")
    assert not Globs(["(a+)+$"]).match("aaaa")


def test_one_of_several_patterns_is_enough():
    globs = Globs(["layer-?", "teacher/*"])
    assert [globs.match(one) for one in ("layer-3", "teacher/", "layer-33", "")] == [True, True, False, False]


def test_no_pattern_can_blow_up():
    globs = Globs(["*a" * 128, "(a+)+$", "?*" * 127 + "z"] * 20)
    assert not globs.match("a" * 100 + "b" * 900)
