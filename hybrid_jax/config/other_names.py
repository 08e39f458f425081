"""Names of vLLM, SGLang, transformers, llama.cpp, MLX-LM and OpenAI that do not exist here.

The error for one says what is meant instead, or that the feature is not built yet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from functools import wraps
from typing import Any, NoReturn, TypeVar

T = TypeVar("T", bound=type)
SIMILAR = 0.75  # of names that may be the same one misspelt, from 0 to 1


@dataclass(frozen=True, kw_only=True)
class OtherNames:
    """The names one place of the public surface refuses, with a word of help.

    Attributes:
        where: the place, as messages name it.
        what: what a name stands for there: "option" or "field".
        ours: by the name elsewhere, the name here, and after it what else there is to know.
        later: by the name elsewhere, the feature that does not exist yet.
        needless: by the name elsewhere, why there is no need for it here.
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


def refuses(names: OtherNames) -> Callable[[T], T]:
    """Lets a dataclass refuse unknown keywords with `OtherNames.refuse`; its signature stays what it was."""

    def decorate(cls: T) -> T:
        plain: Any = cls.__init__  # type: ignore[misc]
        known = {field.name for field in fields(cls)}

        @wraps(plain)
        def __init__(self: object, *args: Any, **given: Any) -> None:
            for name in given:
                if name not in known:
                    names.refuse(name, known)
            plain(self, *args, **given)

        cls.__init__ = __init__  # type: ignore[misc]
        return cls

    return decorate


def by_name(names: Mapping[str, str]) -> dict[str, str]:
    """Meanings by name, from a table of the names of each meaning with spaces between them."""
    return {name: meaning for meaning, listed in names.items() for name in listed.split()}


LLM_OPTIONS = OtherNames(
    where="LLM",
    what="option",
    ours=by_name(
        {
            "SamplingParams(max_tokens=...), given to generate": "max_new_tokens max_tokens",
            "SamplingParams(stop=...), given to generate": "stop",
            "SamplingParams(temperature=...), given to generate": "temperature",
            "SamplingParams(top_k=...), given to generate": "top_k",
            "SamplingParams(top_p=...), given to generate": "top_p",
            "cache (a policy, or 'off')": (
                "disable_radix_cache enable_prefix_caching prefix_caching radix_eviction_policy"
            ),
            "dtype": "torch_dtype",
            "exact": "enable_deterministic_inference",
            "grain": "mamba_block_size",
            "kernels": "attention_backend attn_implementation flash_attn",
            "max_model_len": "context_length max_length max_seq_len n_ctx",
            "max_rows": "batch_size max_batch_size max_num_seqs max_running_requests n_parallel",
            "memory (bytes, or a size like '8GiB')": (
                "gpu_memory_utilization kv_cache_memory_bytes max_mamba_cache_size max_memory "
                "max_total_tokens mem_fraction_static"
            ),
            "model": "model_id model_name model_path path_or_hf_repo pretrained_model_name_or_path",
            "page_tokens": "block_size page_size",
            "prefill_tokens": (
                "chunked_prefill_size max_batch_tokens max_num_batched_tokens n_batch "
                "prefill_step_size"
            ),
            "progress": "use_tqdm",
            "quiet": "log_level verbose",
            "seed": "random_seed",
            "steps_per_dispatch": "num_scheduler_steps",
        }
    ),
    later=by_name(
        {
            "LoRA": "adapter_path enable_lora lora_path lora_paths",
            "a KV cache in another dtype than the model's": "kv_bits kv_cache_dtype type_k type_v",
            "a cache on host memory": "enable_hierarchical_cache swap_space",
            "a recurrent state in another dtype": (
                "mamba_cache_dtype mamba_ssm_cache_dtype mamba_ssm_dtype"
            ),
            "another tokenizer than the one beside the model": "tokenizer",
            "changing the model's config": "hf_overrides rope_scaling",
            "choosing a device": "device",
            "keeping weights on the host": "cpu_offload_gb n_gpu_layers",
            "running code that comes with a model": "trust_remote_code",
            "running on several devices": (
                "data_parallel_size device_map dp_size pipeline_parallel_size pp_size "
                "tensor_parallel_size tensor_split tp_size"
            ),
            "sampling defaults from another file than generation_config.json": "generation_config",
            "speculative decoding": (
                "draft_model num_draft_tokens num_speculative_tokens speculative_algorithm "
                "speculative_config speculative_draft_model_path speculative_model"
            ),
            "weight quantisation": "load_in_4bit load_in_8bit quantization quantization_config",
        }
    ),
    needless=by_name(
        {
            "KV and states share one memory": "mamba_full_memory_ratio",
            "a request may ask for 20 of them": "max_logprobs",
            "each sequence always has a KV cache": "use_cache",
            "every step is compiled, and kept in a cache on disk": (
                "disable_cuda_graph enforce_eager"
            ),
            "nothing is downloaded; model is a directory": (
                "download_dir hf_token local_files_only revision token"
            ),
            "nothing is logged; llm.stats() has the counters": "disable_log_stats",
            "prompts are always computed in chunks, of prefill_tokens": "enable_chunked_prefill",
            "states are cached wherever a prompt may resume; cache names the policy": (
                "mamba_cache_mode"
            ),
            "the files in the directory tell it": "load_format",
        }
    ),
)

SAMPLING = OtherNames(
    where="SamplingParams",
    what="field",
    ours=by_name(
        {
            "bad_words (texts, not token ids)": "bad_words_ids",
            "include_stop_str_in_output": "no_stop_trim",
            "logit_bias (of single tokens)": "sequence_bias",
            "logit_bias ({token id: -100})": "suppress_tokens",
            "logprobs": "n_probs output_scores return_logprob top_logprobs",
            "max_tokens": (
                "max_completion_tokens max_gen_len max_new_tokens max_output_len "
                "max_output_tokens n_predict"
            ),
            "max_tokens (new tokens, without the prompt's)": "max_length",
            "min_tokens": "min_new_tokens",
            "min_tokens (new tokens, without the prompt's)": "min_length",
            "n": "num_return_sequences",
            "n (all completions are returned, none is chosen)": "best_of",
            "repetition_penalty": "rep_pen repeat_penalty",
            "seed": "random_seed sampling_seed",
            "stop": "stop_sequences stop_strings",
            "stop_token_ids": "eos_token_id stop_token_id",
            "structured_outputs=StructuredOutputsParams(choice=...)": "guided_choice",
            "structured_outputs=StructuredOutputsParams(grammar=...)": (
                "ebnf grammar guided_grammar"
            ),
            "structured_outputs=StructuredOutputsParams(json=...)": (
                "guided_decoding guided_json json_schema response_format"
            ),
            "structured_outputs=StructuredOutputsParams(json_object=...)": "guided_json_object",
            "structured_outputs=StructuredOutputsParams(regex=...)": "guided_regex regex",
            "temperature": "temp",
            "temperature (0 is greedy)": "do_sample",
        }
    ),
    later=by_name(
        {
            "LoRA": "lora_request",
            "Mirostat sampling": "mirostat mirostat_eta mirostat_tau",
            "XTC sampling": "xtc_probability xtc_threshold",
            "a function of the caller's over the logits": "logits_processor logits_processors",
            "a function of the caller's that ends the text": "stopping_criteria",
            "a limit in seconds": "max_time",
            "a limit on thinking": "reasoning_effort thinking_budget thinking_token_budget",
            "a penalty that looks back only so many tokens": (
                "repeat_last_n repetition_context_size"
            ),
            "a regular expression that ends the text": "stop_regex",
            "a structural tag": "structural_tag",
            "a temperature that changes": "dynatemp_exponent dynatemp_range",
            "another form of logprobs": "flat_logprobs",
            "arguments of plugins": "extra_args",
            "beam search": (
                "beam_width diversity_penalty early_stopping length_penalty num_beam_groups "
                "num_beams use_beam_search"
            ),
            "choosing the tokens that logprobs are about": "logprob_token_ids",
            "classifier-free guidance": "guidance_scale",
            "contrastive search": "penalty_alpha",
            "cutting prompts short": "truncate_prompt_tokens",
            "ending texts that repeat themselves": "repetition_detection",
            "epsilon sampling": "epsilon_cutoff",
            "eta sampling": "eta_cutoff",
            "forbidding repeated n-grams": "no_repeat_ngram_size",
            "forbidding tokens at the start only": "begin_suppress_tokens",
            "forcing the first token": "forced_bos_token_id",
            "keeping a least number of tokens": "min_tokens_to_keep",
            "passing the prefix cache by for one request": "skip_reading_prefix_cache",
            "spaces between special tokens": "spaces_between_special_tokens",
            "speculative decoding": "prompt_lookup_num_tokens",
            "the DRY penalty": "dry_allowed_length dry_base dry_multiplier",
            "the priority of a request": "priority",
            "top-n-sigma sampling": "top_n_sigma",
            "typical sampling": "typ_p typical_p",
        }
    ),
)

STRUCTURED_OUTPUTS = OtherNames(
    where="StructuredOutputsParams",
    what="field",
    ours=by_name(
        {
            "choice": "choices",
            "grammar": "ebnf lark",
            "json": "json_schema schema",
            "regex": "pattern",
        }
    ),
    later=by_name(
        {
            "a structural tag": "structural_tag",
            "choosing the white space of JSON": "disable_any_whitespace whitespace_pattern",
            "closing every object of a schema": "disable_additional_properties",
        }
    ),
)

CACHE_CONFIG = OtherNames(
    where="CacheConfig",
    what="field",
    ours=by_name(
        {
            "policy": "eviction_policy radix_eviction_policy",
        }
    ),
    later=by_name(
        {
            "a cache on disk": "cache_dir",
            "a cache on host memory": "host_memory",
        }
    ),
    needless=by_name(
        {
            "one order of value over pages and checkpoints does as well without quotas": "kv_quota",
            "stats() counts shortages, evictions and preemptions without them": "watermarks",
        }
    ),
)
