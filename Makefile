# Every target sets up what it needs: only python3 (>= 3.11, with venv and pip) has to be there.
PYTHON ?= python3
CONTAINER ?= podman
BIN := .venv/bin
export PYTHONDONTWRITEBYTECODE :=  # processes that the tests start find the package compiled

# JAX's development version: https://docs.jax.dev/en/latest/installation.html
JAX_NIGHTLY ?= https://us-python.pkg.dev/ml-oss-artifacts-published/jax-public-nightly-artifacts-registry/simple/

.PHONY: demo test quick lint slow gpu browser flare test-oldest test-newest test-nightly dist test-dist container test-packaging check-tag bench docs linkcheck docs-setup setup clean

demo: setup
	$(BIN)/rookery demo

test: setup
	$(MAKE) --no-print-directory --jobs=2 lint quick

# Without rewritten assertions collecting takes half as long. What fails is run again with them, for the values.
quick: setup
	$(BIN)/python -m pytest -n 2 --dist loadgroup --assert=plain -m "not slow and not browser" || \
		{ $(BIN)/python -m pytest --last-failed --last-failed-no-failures none -m "not slow and not browser"; exit 1; }

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/prose.py src *.md docs/*.md docs/tutorials docs/mathematics docs/reference
	@if command -v actionlint >/dev/null; then actionlint; else echo "actionlint is not installed: .github/workflows is not checked"; fi

slow: setup
	$(BIN)/python -m pytest -n 2 -m slow

gpu: setup
	$(BIN)/python -m pytest --noconftest -m "not slow" tests/accelerator

browser: setup
	@command -v chromedriver >/dev/null || { echo "make browser needs Chromium and its driver; on Debian: apt-get install chromium chromium-driver"; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[browser,docs]'
	$(BIN)/python -m pytest -m browser tests/report/browser

flare: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[nvflare]'
	$(BIN)/python -m pytest -m slow tests/engines/federation/test_nvflare.py

test-oldest test-newest test-nightly: test-%: .venv-%/.installed
	.venv-$*/bin/python -m pytest -n 2 --dist loadgroup -m "not slow and not browser"

.venv-oldest/.installed: pyproject.toml constraints-oldest.txt
	$(PYTHON) -m venv .venv-oldest
	.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints-oldest.txt --editable '.[dev]'
	touch $@

.venv-newest/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-newest
	.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --editable '.[dev]'
	touch $@

.venv-nightly/.installed: pyproject.toml
	$(PYTHON) -m venv .venv-nightly
	.venv-nightly/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --editable '.[dev]'
	.venv-nightly/bin/python -m pip install --quiet --disable-pip-version-check --upgrade --pre --extra-index-url $(JAX_NIGHTLY) jax jaxlib
	touch $@

dist: .venv-dist/.installed
	rm -rf build dist
	.venv-dist/bin/python -m build --outdir dist .
	.venv-dist/bin/python -m twine check --strict dist/*

.venv-dist/.installed:
	$(PYTHON) -m venv .venv-dist
	.venv-dist/bin/python -m pip install --quiet --disable-pip-version-check build twine
	touch $@

test-dist:
	$(PYTHON) tools/try_wheel.py dist

container:
	$(CONTAINER) build --file packaging/Containerfile --tag rookery .

test-packaging:
	$(PYTHON) tools/try_packaging.py dist --python $(PYTHON)

check-tag:
	@$(PYTHON) -c 'import os, sys, tomllib; v = "v" + tomllib.load(open("pyproject.toml", "rb"))["project"]["version"]; t = os.environ["TAG"]; sys.exit(t != v and f"TAG must be {v}, as in pyproject.toml; got {t}.")'

bench: setup
	$(BIN)/rookery bench

setup: .venv/.installed

.venv/.installed: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rookery needs Python 3.11 or newer, this is " + sys.version.split()[0] + "; set PYTHON=python3.x")'
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	touch $@

docs: docs-setup
	$(BIN)/python -m rookery.report.methods docs/methods.md
	$(BIN)/python -m rookery.testing.prices docs/privacy-methods.md
	$(BIN)/python -m rookery.experiments.page docs/reproduction docs/reproduction.md
	$(BIN)/python -m rookery.experiments.choice.tables docs/reproduction/choice-problems docs/which-method.md
	$(BIN)/python -m sphinx -E -W --keep-going -b html docs docs/_build/html

linkcheck: docs-setup
	$(BIN)/python -m sphinx -E -q -b linkcheck -D nb_execution_mode=off docs docs/_build/linkcheck

docs-setup: setup
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[docs]'

clean:
	rm -rf .venv .venv-oldest .venv-newest .venv-nightly .venv-dist build dist docs/_build
