"""The checks of scripts/check_interop: run by the Python that has torch and transformers."""

from __future__ import annotations

import contextlib
import io
import os
import pathlib
import shutil
import sys
from collections.abc import Callable

import torch
import transformers

from .bench import Bench, compare, loaded
from .exports import check_export, check_refused, train
from .families import FAMILIES, REFUSED_FAMILIES
from .mxfp4 import store_mxfp4
from .rows import overrides, rows
from .variants import FORCED, REFUSED, VARIANTS


def import_families(bench: Bench) -> None:
    for name, (build, how) in FAMILIES.items():
        if not bench.wants("import " + name):
            continue
        folder = bench.folder / "families" / name
        shutil.rmtree(folder, ignore_errors=True)
        model = build()
        if "dtype" in how:
            model = model.to(how["dtype"])
        with contextlib.redirect_stderr(io.StringIO()):
            model.save_pretrained(folder, **{k: v for k, v in how.items() if k not in ("dtype", "mxfp4")})
        if "mxfp4" in how:
            store_mxfp4(model, folder)
        # Loaded again: model.to(dtype) has rounded more than the weights. MXFP4 is loaded in bf16 alone.
        compare(bench, "import", name, model if "mxfp4" in how else loaded(folder), str(folder))


def refuse_families(bench: Bench) -> None:
    for name, (build, words) in REFUSED_FAMILIES.items():
        if not bench.wants("import " + name):
            continue
        folder = bench.folder / "families" / name
        shutil.rmtree(folder, ignore_errors=True)
        with contextlib.redirect_stderr(io.StringIO()):
            build().save_pretrained(folder)
        message = bench.refusal("generate", str(folder), "-p", "a", "--tokenizer", "byte")
        missing = [word for word in words if word not in message]
        bench.report("refusal", "import " + name, not missing, message.strip().split("\n")[-1].strip()[-160:])


def attempt(bench: Bench, name: str, check: Callable[[], None]) -> None:
    if not bench.wants("export " + name):
        return
    try:
        check()
    except Exception as error:
        bench.report("export", name, False, f"{type(error).__name__}: {str(error).strip()[-600:]}")


def export_variants(bench: Bench) -> None:
    runs: dict[str, pathlib.Path] = {}

    def run_of(variant: str) -> pathlib.Path:
        if variant not in runs:
            runs[variant] = train(bench, variant, None, VARIANTS[variant][1])
        return runs[variant]

    for name, (wanted, _) in VARIANTS.items():
        attempt(bench, name, lambda: check_export(bench, name, run_of(name), wanted, "auto"))
    for name, (variant, form) in FORCED.items():
        attempt(bench, name, lambda: check_export(bench, name, run_of(variant), form, form))
    for name, (variant, form, key) in REFUSED.items():
        attempt(bench, name, lambda: check_refused(bench, name, run_of(variant), form, key))


def export_rows(bench: Bench) -> None:
    more = overrides(bench.folder / "text")
    for name, path in rows().items():
        attempt(bench, name, lambda: check_export(bench, name, train(bench, name, path, more), "", "auto"))


def check_tokenizer(bench: Bench) -> None:
    """Ids of bytes, and what stands in front of a text by itself: what training had there."""
    text = "A byte é 漢 \n\t end<|endoftext|>"
    expected = [*text[:-13].encode(), 256]
    for name, overrides_of, front in (("plain", [], []), ("begin_token", ["data.begin_token=256"], [256])):
        if not bench.wants("tokenizer " + name):
            continue
        folder = bench.folder / "tokenizers" / name
        shutil.rmtree(folder, ignore_errors=True)
        bench.run("export", str(train(bench, "tokenizer_" + name, None, overrides_of)), "-o", str(folder))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        good = ids == expected and tokenizer.decode(expected[:-1]) == text[:-13]
        good = good and tokenizer(text)["input_ids"] == [*front, *expected]
        bench.report("tokenizer", name, good, "ids, text, and the token in front")


def main() -> int:
    folder, sluice, only, tolerance, work = sys.argv[1:6]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
    transformers.logging.set_verbosity_error()
    os.environ.setdefault("HF_MODULES_CACHE", os.path.join(folder, "modules"))
    if work == "goldens":
        from .goldens import write_goldens

        write_goldens()
        return 0
    bench = Bench(pathlib.Path(folder), sluice, only, float(tolerance))
    import_families(bench)
    refuse_families(bench)
    export_variants(bench)
    export_rows(bench)
    check_tokenizer(bench)
    if bench.wants("tasks"):
        from .tasks import check_tasks

        check_tasks(bench)
    counts = ", ".join(f"{count} {kind}" for kind, count in bench.checks.items())
    print(f"{counts}; largest difference of a logit {bench.largest:.1e}")
    print(
        f"{len(bench.failures)} failures; transformers {transformers.__version__}, torch {torch.__version__}"
    )
    for failure in bench.failures:
        print(f"  {failure}")
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
