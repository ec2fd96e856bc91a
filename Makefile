# make demo   environment, then `hypic demo`        make test   environment, lint, types, tests
# make app    environment, then `hypic app`         make clean  removes all that was made here
# make soak   the long counts
#
# Tests of the web page want chromium and chromium-driver, those of the server behind a proxy nginx;
# where these are missing they are skipped, and say so.
#
# PYTHON=python3.12 make test   uses another interpreter for a new environment.
PYTHON ?= python3
VENV ?= .venv
# Test files that run at the same time, each in a process of its own with one thread.
JOBS ?= 2
BIN := $(VENV)/bin
PACKAGES := hypic kernels/hypic_kernels retriever/hypic_retriever apps/hypic_apps

# A stamp is named after all that decides what is installed, so nothing runs twice and nothing is
# missed: the two files by content, and the folder, which an editable install points at.
KEY := $(shell (cat pyproject.toml constraints.txt; echo '$(CURDIR)') | cksum | cut -d ' ' -f 1)
RUN_STAMP := $(VENV)/.run-$(KEY)
APP_STAMP := $(VENV)/.app-$(KEY)
TEST_STAMP := $(VENV)/.test-$(KEY)
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo app test soak clean
.DELETE_ON_ERROR:

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(RUN_STAMP): | $(BIN)/python
	$(INSTALL) -e '.[langchain,retriever]'
	rm -f $(VENV)/.run-* && touch $@

$(APP_STAMP): | $(BIN)/python
	$(INSTALL) -e '.[apps]'
	rm -f $(VENV)/.app-* && touch $@

$(TEST_STAMP): | $(BIN)/python
	$(INSTALL) -e '.[dev,all]'
	rm -f $(VENV)/.run-* $(VENV)/.app-* $(VENV)/.test-* && touch $(RUN_STAMP) $(APP_STAMP) $@

demo: $(RUN_STAMP)
	$(BIN)/hypic demo

app: $(APP_STAMP)
	$(BIN)/hypic app

test: $(TEST_STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy --strict $(PACKAGES)
	$(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile

soak: $(TEST_STAMP)
	$(BIN)/python -m pytest -q -m soak

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./.git -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
