# Two commands matter: `make chat` and `make test`. Each makes .venv and installs on its own.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: chat test test-long chaos lint clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	touch $@

chat: .venv/installed
	$(BIN)/python scripts/chat.py demo

# The suite as two runs side by side, each of which takes the files that the other has not begun with. The second shows
# its output at once, the first when both have ended. What is tiny is computed in one thread: more only wait for each
# other, and take the cores from who has work. And bytecode is kept, even where Python was told not to write any: each of
# some hundred processes would compile all that it imports.
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 PYTHONPATH='$(CURDIR)/tests/one_core' $(BIN)/python -m pytest

define side_by_side
	@share=$$(mktemp -d); trap 'kill $$other 2>/dev/null; rm -rf $$share' EXIT; trap 'exit 130' INT TERM; \
	$(PYTEST) -m '$(1)' --share=$$share -o cache_dir=.pytest_cache/other >$$share/log 2>&1 & other=$$!; \
	$(PYTEST) -m '$(1)' --share=$$share; here=$$?; \
	wait $$other; there=$$?; \
	cat $$share/log; exit $$((here ? here : there))
endef

test: .venv/installed
	$(call side_by_side,not gpu and not long)

test-long: .venv/installed
	$(call side_by_side,long and not gpu)

chaos: .venv/installed
	$(BIN)/python tests/chaos.py --faults 500

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=scripts $(BIN)/mypy scripts/*.py
	PYTHONPATH=scripts/typing $(BIN)/lint-imports
	! grep -rnE 'pickle|recv_pyobj|send_pyobj|torch\.load\b|multiprocessing\.(Queue|Pipe|Pool)' \
		--include='*.py' engine ipc model triton_kernels scripts

clean:
	rm -rf .venv build *.egg-info
