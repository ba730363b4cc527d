# Two commands matter: `make chat` and `make test`. Each makes .venv and installs on its own.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: chat test chaos lint clean

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[demo,dev]'
	touch $@

chat: .venv/installed
	$(BIN)/python scripts/chat.py demo

# The suite as two runs side by side: what computes, and all the rest. The second shows its output at once, the first
# when both have ended. Whatever the patterns do not name is in the second.
COMPUTING := test_batch_invariance.py test_demo_model.py test_engine_exactness.py test_engine_interpreted.py \
    test_engine_llm*.py test_engine_metaspace.py test_engine_params*.py test_engine_sampling.py test_model_*.py \
    test_triton_kernels_*.py
PYTEST := $(BIN)/python -m pytest -m 'not gpu'

test: .venv/installed
	@log=$$(mktemp); trap 'kill $$computing 2>/dev/null; rm -f $$log' EXIT; trap 'exit 130' INT TERM; \
	$(PYTEST) -o cache_dir=.pytest_cache/computing $(COMPUTING:%=tests/%) >$$log 2>&1 & computing=$$!; \
	$(PYTEST) $(COMPUTING:%='--ignore-glob=tests/%'); rest=$$?; \
	wait $$computing; computed=$$?; \
	cat $$log; exit $$((rest ? rest : computed))

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
