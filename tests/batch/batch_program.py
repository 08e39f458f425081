"""The command line over an engine without a model: for tests that kill it.

HYBRID_JAX_TEST_PAUSE: seconds each turn of the engine takes.
HYBRID_JAX_TEST_KILLS: a prompt with these words ends the process.
HYBRID_JAX_TEST_FILE_LIMIT: bytes a file may have, as if the disk were full then.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from pathlib import Path

from hybrid_jax.api import llm as llm_module
from hybrid_jax.api import starting
from hybrid_jax.api.workers import process
from hybrid_jax.cli import main as cli
from hybrid_jax.text import tokenizer
from tests.api.fake_engine import CONFIG
from tests.batch.batch_files import SeededEngine
from tests.llms import byte_tokenizer, opened

KILLS = os.environ.get("HYBRID_JAX_TEST_KILLS", "").encode()
PAUSE = float(os.environ.get("HYBRID_JAX_TEST_PAUSE", "0"))


class PausingEngine(SeededEngine):
    def step(self):
        time.sleep(PAUSE)
        if KILLS and any(KILLS in bytes(request.prompt) for request in self.requests.values()):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


def without_model():
    """Has every `LLM` of this process run the engine without a model."""
    starting.Engine = PausingEngine
    starting.open_with_drafter = lambda *_: opened(CONFIG)
    starting.weights_digest = lambda config, params: "no weights"
    llm_module.default_params = lambda folder: llm_module.SamplingParams()
    tokenizer.Tokenizer.from_directory = classmethod(lambda cls, path: byte_tokenizer())
    process.MODULE = "tests.batch.worker_program"


def connect_without_model(address):
    """A small cluster whose actors run the engine without a model."""
    from hybrid_jax.ray import replicas

    replicas.ray.init(
        address,
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 << 20,
        log_to_driver=False,
        runtime_env={"worker_process_setup_hook": "tests.batch.batch_program.without_model"},
    )


if __name__ == "__main__":
    if limit := int(os.environ.get("HYBRID_JAX_TEST_FILE_LIMIT", "0")):
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    # A shell's background job ignores Ctrl-C and hands that on; this program must not.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    without_model()
    if "--ray" in sys.argv:
        from hybrid_jax.ray import replicas

        replicas.connect = connect_without_model
    assert Path(llm_module.BUNDLED, "config.json").is_file()
    cli.main()
