# make demo, make test: each sets itself up. make check: everything CI runs. uv is used if installed.
# make test leaves out the tests marked exhaustive, and draws a fifth of the examples (tests/conftest.py
# reads -m for that); make check runs a twentieth of the exhaustive tests, another one each day;
# make test-all runs everything; make coverage measures the branches that the quick tests run, which
# take twice as long with it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Each worker starts with consecutive tests, so that it creates their fixtures once.
PYTEST := $(BIN)/pytest --numprocesses auto --dist worksteal

ifeq ($(shell command -v uv 2>/dev/null),)
CREATE_VENV := $(PYTHON) -m venv $(VENV)
INSTALL := $(BIN)/python -m pip install --quiet --no-input --disable-pip-version-check
else
CREATE_VENV := uv venv --quiet --python $(PYTHON) $(VENV)
INSTALL := uv pip install --quiet --python $(BIN)/python
endif

.PHONY: demo test test-all coverage test-browser check docs programs lint format tree types imports wheel requirements clean

demo: $(VENV)/.runtime
	$(BIN)/memfit estimate
	@echo
	@echo "That was a sample. What next (after 'source $(BIN)/activate' it is memfit):"
	@echo "  $(BIN)/memfit fits --memory 32GB                     what a Mac with 32 GB can run"
	@echo "  $(BIN)/memfit qwen3-8b-4bit --device m4-max-64       one model on a Mac; memfit devices lists the names"
	@echo "  $(BIN)/memfit server qwen3-8b-4bit --memory 16GB     what mlx_lm.server takes, and its flags"

test: $(VENV)/.dev
	$(PYTEST) -m 'not exhaustive'

test-all: $(VENV)/.dev
	MEMFIT_TESTS=all $(PYTEST)

coverage: $(VENV)/.dev
	$(PYTEST) -m 'not exhaustive' --cov --cov-report=
	@echo "branch coverage: $$($(BIN)/coverage report --format=total) %"

# The pages of --format html in Chromium; `make check` runs these too, where it is installed.
test-browser: $(VENV)/.dev
	.ci/install-browser
	$(BIN)/pytest tests/browser

# Each of the first uses one core, so that two run at a time.
check: $(VENV)/.dev
	$(MAKE) --jobs 2 types imports wheel lint
	MEMFIT_TESTS=day $(PYTEST)

# Everything that is generated from the code; a test fails where a file is stale.
docs: $(VENV)/.dev
	$(BIN)/python -m tests.test_schemas
	$(BIN)/python -m tests.arch.test_architectures_page
	$(BIN)/python -m tests.probes.test_a_figure_is_one_row
	$(BIN)/python -m tests.api.test_page
	$(BIN)/python -m tests.cli.test_first_screen
	$(BIN)/python -m tests.trace.test_rules_page
	$(BIN)/python -m tests.recording.test_classes_page
	$(BIN)/python -m tests.test_docs
	-$(BIN)/python -m tests.browser.screenshots

# The recorded classes of mlx-lm, of all or those in CLASSES: docs/programs.md. It takes minutes.
programs: $(VENV)/.dev
	$(BIN)/python -m memfit.estimators.recording.make $(CLASSES)

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# mypy and import-linter know folders only, so they read the link tree.
tree:
	.ci/link-tree

types: $(VENV)/.dev tree
	cd .tree && MYPYPATH=. ../$(BIN)/mypy --config-file ../pyproject.toml *

imports: $(VENV)/.dev tree
	cd .tree && PYTHONPATH=. ../$(BIN)/lint-imports --config ../pyproject.toml

wheel: $(VENV)/.dev
	.ci/test-wheel

# What .ci/install installs, for every Python and platform; needs uv.
requirements:
	echo setuptools | uv pip compile --quiet --universal --python-version 3.10 --upgrade --generate-hashes \
		--no-annotate --custom-compile-command 'make requirements' --constraint constraints.txt \
		--output-file requirements.txt pyproject.toml -

clean:
	rm -rf $(VENV) .tree build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 10) or sys.exit("memfit needs Python 3.10 or newer; name one: make PYTHON=python3.12")'
	rm -rf $(VENV)
	$(CREATE_VENV)
	@touch $@

$(VENV)/.runtime: $(VENV)/.created pyproject.toml constraints.txt
	$(INSTALL) --constraint constraints.txt --editable .
	@touch $@

$(VENV)/.dev: $(VENV)/.created pyproject.toml constraints.txt estimators/base/version.py
	$(INSTALL) --constraint constraints.txt --editable '.[dev]'
	@touch $(VENV)/.runtime $@
