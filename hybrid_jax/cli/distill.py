"""The command `distill`: a model with a cut from one without, and the table by which its cut is chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from hybrid_jax import train
from hybrid_jax.cli.exits import JsonOption, note, write, write_json
from hybrid_jax.cli.options.cut import CutOption, KVGroupOption, StateGroupOption
from hybrid_jax.display import text_table


def distill(
    model: Annotated[
        str | None,
        typer.Option(help="Directory of the model without a cut; the bundled one by default."),
    ] = None,
    cut: CutOption = None,
    kv_group: KVGroupOption = 1,
    state_group: StateGroupOption = 1,
    source: Annotated[
        list[Path] | None,
        typer.Option(
            "--data",
            help="Directory of texts (.py, .txt, .md, .rst); may be repeated. "
            "Python's standard library by default.",
        ),
    ] = None,
    out_dir: Annotated[
        Path | None, typer.Option("--out", help="Where the model with the cut goes.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Optimizer steps.")] = train.DISTILL.steps,
    minutes: Annotated[
        float | None, typer.Option(help="Wall-clock minutes of the training.")
    ] = train.DISTILL.minutes,
    seed: Annotated[int, typer.Option(help="Seed of the data's order.")] = train.DISTILL.seed,
    resume: Annotated[bool, typer.Option(help="Go on with an earlier run in --out.")] = True,
    batch: Annotated[int, typer.Option(help="Rows of a step.")] = train.DISTILL.batch,
    context: Annotated[int, typer.Option(help="Tokens of a row.")] = train.DISTILL.context,
    learning_rate: Annotated[
        float, typer.Option(help="Peak rate of Adam.")
    ] = train.DISTILL.learning_rate,
    loss: Annotated[
        str,
        typer.Option(
            help="kl: the distribution of the model without a cut; lm: the tokens that follow."
        ),
    ] = "kl",
    all_later: Annotated[
        bool, typer.Option("--all-later", help="Train all weights after the cut.")
    ] = False,
    exit_head: Annotated[
        bool,
        typer.Option(
            "--exit-head", help="Also train a head on the cut, which drafts: --speculation exit."
        ),
    ] = False,
    table: Annotated[
        bool,
        typer.Option(
            "--table",
            help="Train nothing; show what each cut would save and cost. With --cut: that one.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a model whose prompts skip the later layers (SwiftKV).

    The model with a cut is trained to imitate the original model. Use --table to choose the cut. Install what
    this needs with: pip install 'hybrid_jax[train]'
    """
    groups: dict[str, Any] = {"kv_group": kv_group, "state_group": state_group}
    if table:
        changed = {
            "--out": out_dir is not None,
            "--steps": steps != train.DISTILL.steps,
            "--minutes": minutes != train.DISTILL.minutes,
            "--seed": seed != train.DISTILL.seed,
            "--no-resume": not resume,
            "--batch": batch != train.DISTILL.batch,
            "--context": context != train.DISTILL.context,
            "--learning-rate": learning_rate != train.DISTILL.learning_rate,
            "--loss": loss != "kl",
            "--all-later": all_later,
            "--exit-head": exit_head,
        }
        if given := [name for name, is_given in changed.items() if is_given]:
            raise ValueError(
                f"distill: --table trains nothing, so it takes no {' and no '.join(given)}"
            )
        cuts = None if cut is None else [cut]
        found = train.cut_table(model, cuts=cuts, sources=source, **groups)
        write_json(found) if as_json else _write_table(found)
        return
    for name, value in (("--cut", cut), ("--out", out_dir)):
        if value is None:
            raise ValueError(
                f"distill: {name} is missing; --table shows what each cut would save and cost"
            )
    assert cut is not None and out_dir is not None
    record = train.distill(
        out_dir,
        model,
        cut=cut,
        loss=loss,  # type: ignore[arg-type]
        all_later=all_later,
        exit_head=exit_head,
        steps=steps,
        minutes=minutes,
        seed=seed,
        resume=resume,
        batch=batch,
        context=context,
        sources=source,
        progress=not as_json,
        learning_rate=learning_rate,
        **groups,
    )
    if as_json:
        write_json(record)
        return
    for name in ("untrained", "trained"):
        far = record["held_out"][name]
        write(
            f"{name}: perplexity {far['perplexity_ratio']:.4f} of the model without a cut, "
            f"KL {far['kl']:.4f} nats a token, most likely token the same {far['agreement']:.1%}"
        )
    note(f"the model is in {out_dir}; hybrid-jax generate --model {out_dir} PROMPT")


def _write_table(found: dict[str, Any]) -> None:
    """As text, one line for each cut."""
    titles = ("cut", "FLOPs saved", "SimScore", "perplexity", "KL nats", "same token")
    rows = [titles]
    for each in found["cuts"]:
        score = each["sim_score"]
        rows.append(
            (
                str(each["cut"]),
                f"{each['flops_saved']:.1%}",
                "-" if score is None else f"{score:.3f}",
                f"x{each['perplexity_ratio']:.4f}",
                f"{each['kl']:.4f}",
                f"{each['agreement']:.1%}",
            )
        )
    for line in text_table(rows):
        write(line)
    write(
        f"\nFor a cut after that number of the {found['layers']} layers, before any training, on {found['tokens']:,} "
        f"held-out tokens.\nFLOPs: of a prompt of {found['flops_saved_at']:,} tokens. SimScore: how alike the inputs "
        "of later layers are to the\ncut's output. The others: against the model without a cut."
    )
    for cut, error in found["refused"].items():
        note(f"no cut {cut}: {error.removeprefix('with_cut: ')}")
