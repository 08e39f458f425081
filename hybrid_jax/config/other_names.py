"""Names that do not exist here: what is meant instead, or that it is not built yet.

Both tables of a place are about names that vLLM, SGLang, transformers, llama.cpp, MLX-LM or OpenAI use.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
SIMILAR = 0.75  # of names that may be the same one misspelt, from 0 to 1


@dataclass(frozen=True, kw_only=True)
class OtherNames:
    """The names one place of the public surface refuses, with a word of help.

    Attributes:
        where: the place, as messages name it.
        what: what a name stands for there: "option" or "field".
        ours: name elsewhere -> the name here, and after it what else there is to know.
        later: name elsewhere -> the feature that does not exist yet.
        needless: name elsewhere -> why there is no need for it here.
    """

    where: str
    what: str
    ours: Mapping[str, str]
    later: Mapping[str, str]
    needless: Mapping[str, str] = field(default_factory=dict)

    def refuse(self, name: str, known: Collection[str]) -> NoReturn:
        """Raises for a name that is not among the known ones.

        Raises:
            NotImplementedError: it belongs to a feature that does not exist yet.
            TypeError: anything else; the message has the name that was probably meant, or all there are.
        """
        if name in self.later:
            raise NotImplementedError(
                f"{self.where}: {name}: {self.later[name]} is not built yet; leave it out"
            )
        if name in self.needless:
            raise TypeError(f"{self.where}: {name}: {self.needless[name]}; leave it out")
        near = get_close_matches(name, known, n=1, cutoff=SIMILAR)
        meant = self.ours.get(name) or next(iter(near), None)
        hint = f"did you mean {meant}?" if meant else f"it has {', '.join(sorted(known))}"
        raise TypeError(f"{self.where}: unknown {self.what} {name!r}; {hint}")


def refuses(names: OtherNames) -> Callable[[type[T]], type[T]]:
    """Lets a dataclass refuse unknown keywords with `OtherNames.refuse`; its signature stays what it was."""

    def decorate(cls: type[T]) -> type[T]:
        plain: Callable[..., None] = cls.__init__
        known = {field.name for field in fields(cls)}

        @wraps(plain)
        def __init__(self: T, *args: Any, **given: Any) -> None:
            for name in given:
                if name not in known:
                    names.refuse(name, known)
            plain(self, *args, **given)

        cls.__init__ = __init__
        return cls

    return decorate


MEMORY = "memory (bytes, or a size like '8GiB')"
OF_REQUESTS = "SamplingParams({}=...), given to generate"
CONFIG_CHANGES = "changing the model's config"
CACHE = "cache (a policy, or 'off')"
DEVICES = "running on several devices"
LORA = "LoRA"
NO_EAGER = "every step is compiled, and kept in a cache on disk"
NO_HUB = "nothing is downloaded; model is a directory"
OFFLOADING = "keeping weights on the host"
HOST_CACHE = "a cache on host memory"
KV_DTYPE = "a KV cache in another dtype than the model's"
QUANTISATION = "weight quantisation"
SPECULATION = "speculative decoding"
STATE_DTYPE = "a recurrent state in another dtype"

LLM_OPTIONS = OtherNames(
    where="LLM",
    what="option",
    ours={
        "attention_backend": "kernels",
        "attn_implementation": "kernels",
        "batch_size": "max_rows",
        "block_size": "page_tokens",
        "chunked_prefill_size": "prefill_tokens",
        "context_length": "max_model_len",
        "disable_radix_cache": CACHE,
        "enable_deterministic_inference": "exact",
        "enable_prefix_caching": CACHE,
        "flash_attn": "kernels",
        "gpu_memory_utilization": MEMORY,
        "kv_cache_memory_bytes": MEMORY,
        "log_level": "quiet",
        "mamba_block_size": "grain",
        "max_batch_size": "max_rows",
        "max_batch_tokens": "prefill_tokens",
        "max_length": "max_model_len",
        "max_mamba_cache_size": MEMORY,
        "max_memory": MEMORY,
        "max_new_tokens": OF_REQUESTS.format("max_tokens"),
        "max_num_batched_tokens": "prefill_tokens",
        "max_num_seqs": "max_rows",
        "max_running_requests": "max_rows",
        "max_seq_len": "max_model_len",
        "max_tokens": OF_REQUESTS.format("max_tokens"),
        "max_total_tokens": MEMORY,
        "mem_fraction_static": MEMORY,
        "model_id": "model",
        "model_name": "model",
        "model_path": "model",
        "n_batch": "prefill_tokens",
        "n_ctx": "max_model_len",
        "n_parallel": "max_rows",
        "num_scheduler_steps": "steps_per_dispatch",
        "page_size": "page_tokens",
        "path_or_hf_repo": "model",
        "prefill_step_size": "prefill_tokens",
        "prefix_caching": CACHE,
        "pretrained_model_name_or_path": "model",
        "radix_eviction_policy": CACHE,
        "random_seed": "seed",
        "stop": OF_REQUESTS.format("stop"),
        "temperature": OF_REQUESTS.format("temperature"),
        "top_k": OF_REQUESTS.format("top_k"),
        "top_p": OF_REQUESTS.format("top_p"),
        "torch_dtype": "dtype",
        "use_tqdm": "progress",
        "verbose": "quiet",
    },
    later={
        "adapter_path": LORA,
        "cpu_offload_gb": OFFLOADING,
        "data_parallel_size": DEVICES,
        "device": "choosing a device",
        "device_map": DEVICES,
        "dp_size": DEVICES,
        "draft_model": SPECULATION,
        "enable_hierarchical_cache": HOST_CACHE,
        "enable_lora": LORA,
        "generation_config": "sampling defaults from another file than generation_config.json",
        "hf_overrides": CONFIG_CHANGES,
        "kv_bits": KV_DTYPE,
        "kv_cache_dtype": KV_DTYPE,
        "load_in_4bit": QUANTISATION,
        "load_in_8bit": QUANTISATION,
        "lora_path": LORA,
        "lora_paths": LORA,
        "mamba_cache_dtype": STATE_DTYPE,
        "mamba_ssm_cache_dtype": STATE_DTYPE,
        "mamba_ssm_dtype": STATE_DTYPE,
        "n_gpu_layers": OFFLOADING,
        "num_draft_tokens": SPECULATION,
        "num_speculative_tokens": SPECULATION,
        "pipeline_parallel_size": DEVICES,
        "pp_size": DEVICES,
        "quantization": QUANTISATION,
        "quantization_config": QUANTISATION,
        "rope_scaling": CONFIG_CHANGES,
        "speculative_algorithm": SPECULATION,
        "speculative_config": SPECULATION,
        "speculative_draft_model_path": SPECULATION,
        "speculative_model": SPECULATION,
        "swap_space": HOST_CACHE,
        "tensor_parallel_size": DEVICES,
        "tensor_split": DEVICES,
        "tokenizer": "another tokenizer than the one beside the model",
        "tp_size": DEVICES,
        "trust_remote_code": "running code that comes with a model",
        "type_k": KV_DTYPE,
        "type_v": KV_DTYPE,
    },
    needless={
        "disable_cuda_graph": NO_EAGER,
        "disable_log_stats": "nothing is logged; llm.stats() has the counters",
        "download_dir": NO_HUB,
        "enable_chunked_prefill": "prompts are always computed in chunks, of prefill_tokens",
        "enforce_eager": NO_EAGER,
        "hf_token": NO_HUB,
        "load_format": "the files in the directory tell it",
        "local_files_only": NO_HUB,
        "mamba_cache_mode": "states are cached wherever a prompt may resume; cache names the policy",
        "mamba_full_memory_ratio": "KV and states share one memory",
        "max_logprobs": "a request may ask for 20 of them",
        "revision": NO_HUB,
        "token": NO_HUB,
        "use_cache": "each sequence always has a KV cache",
    },
)

FORM = "structured_outputs=StructuredOutputsParams({}=...)"
BEAMS = "beam search"
DRY = "the DRY penalty"
MIROSTAT = "Mirostat sampling"
THINKING = "a limit on thinking"
PENALTY_WINDOW = "a penalty that looks back only so many tokens"
PROCESSORS = "a function of the caller's over the logits"
XTC = "XTC sampling"

SAMPLING = OtherNames(
    where="SamplingParams",
    what="field",
    ours={
        "bad_words_ids": "bad_words (texts, not token ids)",
        "best_of": "n (all completions are returned, none is chosen)",
        "do_sample": "temperature (0 is greedy)",
        "ebnf": FORM.format("grammar"),
        "eos_token_id": "stop_token_ids",
        "grammar": FORM.format("grammar"),
        "guided_choice": FORM.format("choice"),
        "guided_decoding": FORM.format("json"),
        "guided_grammar": FORM.format("grammar"),
        "guided_json": FORM.format("json"),
        "guided_json_object": FORM.format("json_object"),
        "guided_regex": FORM.format("regex"),
        "json_schema": FORM.format("json"),
        "max_completion_tokens": "max_tokens",
        "max_gen_len": "max_tokens",
        "max_length": "max_tokens (new tokens, without the prompt's)",
        "max_new_tokens": "max_tokens",
        "max_output_len": "max_tokens",
        "max_output_tokens": "max_tokens",
        "min_length": "min_tokens (new tokens, without the prompt's)",
        "min_new_tokens": "min_tokens",
        "n_predict": "max_tokens",
        "n_probs": "logprobs",
        "no_stop_trim": "include_stop_str_in_output",
        "num_return_sequences": "n",
        "output_scores": "logprobs",
        "random_seed": "seed",
        "regex": FORM.format("regex"),
        "rep_pen": "repetition_penalty",
        "repeat_penalty": "repetition_penalty",
        "response_format": FORM.format("json"),
        "return_logprob": "logprobs",
        "sampling_seed": "seed",
        "sequence_bias": "logit_bias (of single tokens)",
        "stop_sequences": "stop",
        "stop_strings": "stop",
        "stop_token_id": "stop_token_ids",
        "suppress_tokens": "logit_bias ({token id: -100})",
        "temp": "temperature",
        "top_logprobs": "logprobs",
    },
    later={
        "beam_width": BEAMS,
        "begin_suppress_tokens": "forbidding tokens at the start only",
        "diversity_penalty": BEAMS,
        "dry_allowed_length": DRY,
        "dry_base": DRY,
        "dry_multiplier": DRY,
        "dynatemp_exponent": "a temperature that changes",
        "dynatemp_range": "a temperature that changes",
        "early_stopping": BEAMS,
        "epsilon_cutoff": "epsilon sampling",
        "eta_cutoff": "eta sampling",
        "extra_args": "arguments of plugins",
        "flat_logprobs": "another form of logprobs",
        "forced_bos_token_id": "forcing the first token",
        "guidance_scale": "classifier-free guidance",
        "length_penalty": BEAMS,
        "logits_processor": PROCESSORS,
        "logits_processors": PROCESSORS,
        "logprob_token_ids": "choosing the tokens that logprobs are about",
        "lora_request": LORA,
        "max_time": "a limit in seconds",
        "min_tokens_to_keep": "keeping a least number of tokens",
        "mirostat": MIROSTAT,
        "mirostat_eta": MIROSTAT,
        "mirostat_tau": MIROSTAT,
        "no_repeat_ngram_size": "forbidding repeated n-grams",
        "num_beam_groups": BEAMS,
        "num_beams": BEAMS,
        "penalty_alpha": "contrastive search",
        "priority": "the priority of a request",
        "prompt_lookup_num_tokens": SPECULATION,
        "reasoning_effort": THINKING,
        "repeat_last_n": PENALTY_WINDOW,
        "repetition_context_size": PENALTY_WINDOW,
        "repetition_detection": "ending texts that repeat themselves",
        "skip_reading_prefix_cache": "passing the prefix cache by for one request",
        "spaces_between_special_tokens": "spaces between special tokens",
        "stop_regex": "a regular expression that ends the text",
        "stopping_criteria": "a function of the caller's that ends the text",
        "structural_tag": "a structural tag",
        "thinking_budget": THINKING,
        "thinking_token_budget": THINKING,
        "top_n_sigma": "top-n-sigma sampling",
        "truncate_prompt_tokens": "cutting prompts short",
        "typ_p": "typical sampling",
        "typical_p": "typical sampling",
        "use_beam_search": BEAMS,
        "xtc_probability": XTC,
        "xtc_threshold": XTC,
    },
)

STRUCTURED_OUTPUTS = OtherNames(
    where="StructuredOutputsParams",
    what="field",
    ours={
        "choices": "choice",
        "ebnf": "grammar",
        "json_schema": "json",
        "lark": "grammar",
        "pattern": "regex",
        "schema": "json",
    },
    later={
        "disable_additional_properties": "closing every object of a schema",
        "disable_any_whitespace": "choosing the white space of JSON",
        "structural_tag": "a structural tag",
        "whitespace_pattern": "choosing the white space of JSON",
    },
)

CACHE_CONFIG = OtherNames(
    where="CacheConfig",
    what="field",
    ours={"eviction_policy": "policy", "radix_eviction_policy": "policy"},
    later={"cache_dir": "a cache on disk", "host_memory": HOST_CACHE},
    needless={
        "kv_quota": "one order of value over pages and checkpoints does as well without quotas",
        "watermarks": "stats() counts shortages, evictions and preemptions without them",
    },
)
