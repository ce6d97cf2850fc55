import json
import logging
import subprocess
import sys

import pytest

from mixle.data.teacher.log_setup import setup_logging


@pytest.fixture(autouse=True)
def restored():
    logger = logging.getLogger("mixle")
    before = logger.level, list(logger.handlers)
    yield
    logger.setLevel(before[0])
    logger.handlers[:] = before[1]


def test_mixles_messages_go_to_stderr_once_and_others_do_not():
    code = (
        "import logging; from mixle.data.teacher.log_setup import setup_logging\n"
        "setup_logging(); setup_logging('info')\n"
        "logging.getLogger('mixle.data.teacher.broker').info('told')\n"
        "logging.getLogger('mixle.data.teacher.broker').debug('hidden')\n"
        "logging.getLogger('other').info('hidden')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.rstrip().endswith("mixle.data.teacher.broker INFO: told")


def test_a_program_that_has_handlers_of_its_own_gets_no_more():
    code = (
        "import json, logging; from mixle.data.teacher.log_setup import setup_logging\n"
        "logging.basicConfig(format='own %(message)s')\n"
        "setup_logging('DEBUG')\n"
        "logging.getLogger('mixle.x').debug('told')\n"
        "print(json.dumps(len(logging.getLogger('mixle').handlers)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stderr == "own told\n"
    assert json.loads(done.stdout) == 0


@pytest.mark.parametrize(("level", "number"), [("DEBUG", 10), ("warning", 30), (logging.ERROR, 40), (15, 15)])
def test_levels_are_names_or_numbers(level, number):
    setup_logging(level)
    assert logging.getLogger("mixle.data").getEffectiveLevel() == number


@pytest.mark.parametrize(
    ("level", "error", "message"),
    [
        ("INFOS", ValueError, "level='INFOS' must be one of"),
        (None, TypeError, "level=None must be the name or number"),
        (True, TypeError, "level=True must be"),
        (1.5, TypeError, "level=1.5 must be"),
    ],
)
def test_a_level_that_is_none_is_refused(level, error, message):
    with pytest.raises(error, match=message):
        setup_logging(level)
