# Two commands matter: `make chat` and `make test`. Each makes .venv and installs on its own.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: chat test lint clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	touch $@

chat: .venv/installed
	$(BIN)/python scripts/chat.py demo

test: .venv/installed
	$(BIN)/python -m pytest -m 'not gpu'

lint: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=scripts/typing $(BIN)/lint-imports
	! grep -rnE 'pickle|recv_pyobj|send_pyobj|torch\.load\b|multiprocessing\.(Queue|Pipe|Pool)' \
		--include='*.py' engine ipc model triton_kernels scripts

clean:
	rm -rf .venv build *.egg-info
