"""Fetch the demo model, SmolLM2-135M-Instruct, and print where it lies; `demo` names it wherever a model is named."""

import sys

from tercet.engine.errors import ModelNotFound
from tercet.engine.model_files import demo_model

if __name__ == "__main__":
    try:
        print(demo_model())
    except ModelNotFound as error:
        sys.exit(f"tercet: {error}")
