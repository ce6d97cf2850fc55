# `make demo` and `make test` need only python3.11 (with venv and pip) and make; both install into .venv, once.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test docs clean

demo: $(VENV)/demo-installed
	$(BIN)/mixle lm --nproc 2

test: $(VENV)/test-installed
	$(BIN)/python -m pytest -n 2 --dist loadfile

docs: $(VENV)/docs-installed
	$(BIN)/python -m sphinx -W -n -b html docs docs/_build/html

$(VENV)/demo-installed: EXTRAS = torch,cli
$(VENV)/test-installed: EXTRAS = torch,teacher,diloco,cli,test
$(VENV)/docs-installed: EXTRAS = torch,teacher,diloco,cli,docs

$(VENV)/%-installed: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[$(EXTRAS)]'
	touch $@

clean:
	rm -rf $(VENV) docs/_build
