"""All that `raddle bench gpu` measures, after the tables of the FlashInfer paper and what serving engines do."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from raddle.bench.gpu.cases import Case, Section, lengths

_PREFILL = (512, 1024, 2048, 4096, 8192, 16384)
_MHA = (16, 16, 128)
_PAGED_PEERS = ("flashinfer", "fa3")
_PEERS = (*_PAGED_PEERS, "cudnn", "flex", "fa2")


def _decode(kind: str, mean: int, batch: int, **options: object) -> Case:
    dense = _PEERS if kind == "constant" else _PAGED_PEERS
    name = f"{kind} {mean} B{batch}"
    chosen = {"peers": dense, "floor": True, **options}
    return Case(name, (1,) * batch, lengths(kind, batch, mean), **chosen)


def _first_table() -> tuple[Case, ...]:
    def targets(floor: float, flashinfer: float, **more: float) -> dict[str, float]:
        return {"floor": floor, "flashinfer": flashinfer, **more}

    return (
        _decode("constant", 1024, 16, at_least=targets(0.92, 1.3, cudnn=1.04)),
        _decode("uniform", 1024, 16, at_least=targets(0.90, 1.45)),
        _decode("skewed", 1024, 16, at_least=targets(0.90, 1.3)),
        _decode("constant", 8192, 16, at_least=targets(0.98, 1.08)),
        _decode("uniform", 8192, 16, at_least=targets(0.97, 1.1)),
        _decode("skewed", 8192, 16, at_least=targets(0.97, 1.09)),
        _decode("constant", 8192, 1, at_least=targets(0.90, 1.38, cudnn=1.28)),
        _decode("constant", 4096, 64, at_least=targets(0.99, 1.05)),
        _decode("uniform", 4096, 128, at_least=targets(0.98, 1.07)),
    )


def _named(name: str, case: Case, **changes: object) -> Case:
    return Case(**{**case.__dict__, "name": name, "peers": (), "floor": False, "at_least": {}, **changes})


def _pages() -> tuple[Case, ...]:
    base = _decode("constant", 8192, 16)
    own = {"versus": "page 16", "at_least": {"versus": 0.95}}
    sizes = [_named("page 16", base, peers=("flashinfer",), floor=True)]
    sizes += [_named(f"page {n}", base, page_size=n, peers=("flashinfer",), **own) for n in (1, 64, 128, 256)]
    return (*sizes, _named("page 1, uniform", _decode("uniform", 8192, 16), page_size=1, peers=("flashinfer",)))


def _decode_families() -> tuple[Case, ...]:
    """Decodes on the kernels that are chosen, and on those of each family where it is asked for."""
    rows = [_named(case.name, case, floor=True, backends=("mma", "wgmma")) for case in _first_table()]
    for base in (_decode("constant", 1024, 16), _decode("constant", 8192, 16)):
        for page in (1, 64, 128):
            name = f"{base.name}, page {page}"
            rows.append(_named(name, base, page_size=page, backends=("mma", "wgmma"), versus=base.name))
    return tuple(rows)


def _decode_variants() -> tuple[Case, ...]:
    base = _decode("constant", 8192, 16)
    own = {"versus": "causal", "at_least": {"versus": 0.95}}
    names = ("plain", "wide window", "softcap", "alibi", "sinks", "sigmoid")
    return (_named("causal", base), *(_named(name, base, variant=name, **own) for name in names))


def _prefill(length: int, heads: tuple[int, int, int] = _MHA, batch: int = 16, **options: object) -> Case:
    chosen = {"form": "ragged", "unit": "TFLOP/s", "peers": (*_PEERS, "fa4"), **options}
    return Case(f"causal S{length}", (length,) * batch, (length,) * batch, heads, **chosen)


def _prefill_rows() -> tuple[Case, ...]:
    at_least = {"flashinfer fa2": 1.0}
    return tuple(_prefill(n, at_least=at_least if n >= 1024 else {}) for n in _PREFILL)


def _prefill_ragged() -> tuple[Case, ...]:
    rows = []
    for kind in ("constant", "uniform", "skewed"):
        n = lengths(kind, 16, 8192)
        ragged = Case(f"{kind} 8192, ragged", n, n, form="ragged", unit="TFLOP/s", peers=(*_PAGED_PEERS, "fa4"))
        rows.append(ragged)
        for page, share in ((16, 0.97), (1, 0.9)):
            own = {"versus": ragged.name, "at_least": {"versus": share}}
            peers = _PAGED_PEERS if page == 16 else ()
            rows.append(_named(f"{kind} 8192, page {page}", ragged, form="paged", page_size=page, peers=peers, **own))
    return tuple(rows)


def _prefill_variants() -> tuple[Case, ...]:
    rows = []
    for n in (4096, 16384):
        base = _prefill(n)
        rows.append(_named(f"causal S{n}", base))
        for variant in ("softcap", "alibi", "window"):
            own = {"versus": f"causal S{n}", "at_least": {"versus": 0.9}}
            peers = ("flex", "fa3", "fa4") if n == 16384 else ("fa3", "fa4")
            rows.append(_named(f"{variant} S{n}", base, variant=variant, peers=peers, **own))
    return tuple(rows)


def _prefill_dims() -> tuple[Case, ...]:
    rows = []
    options = {"peers": (*_PAGED_PEERS, "cudnn", "fa4"), "at_least": {"flashinfer fa2": 1.0}}
    for dim, batch in ((64, 16), (256, 8)):
        for n in (1024, 4096, 16384):
            rows.append(_named(f"D{dim} S{n}", _prefill(n, (16, 16, dim), batch), **options))
    for n in (4096, 16384):  # prompts of MLA, whose weights are not absorbed
        rows.append(_named(f"D192/128 S{n}", _prefill(n, (16, 16, 192), 8, values=128), **options))
    return tuple(rows)


def _flex() -> tuple[Case, ...]:
    rows = []
    for n, batch in ((4096, 8), (16384, 4)):
        base = _prefill(n, batch=batch, peers=("flex",), is_call=True, at_least={"flex": 1.3})
        rows += [_named(f"{name} S{n}", base, variant=name, peers=base.peers, at_least=base.at_least)
                 for name in ("causal", "window", "documents", "softcap")]  # fmt: skip
    return tuple(rows)


def _mixed() -> tuple[Case, ...]:
    def row(name: str, requests: Sequence[tuple[int, int]], bar: float) -> Case:
        qo_len, kv_len = zip(*requests)
        return Case(name, qo_len, kv_len, peers=("flashinfer",), floor=True, at_least={"flashinfer": bar})

    return (
        row("2 prefills of 2048 + 64 decodes at 2048", [(2048, 2048)] * 2 + [(1, 2048)] * 64, 1.3),
        row("chunk of 512 at 4096 + 128 decodes at 1024", [(512, 4096)] + [(1, 1024)] * 128, 1.3),
    )


def _prefix() -> tuple[Case, ...]:
    rows = []
    for shared, own, batch, bar in (
        (8192, 256, 16, {"flashinfer single": 2.5}),
        (32768, 256, 16, {"flashinfer single": 3.5}),
        (8192, 256, 64, {"flashinfer single": 3.5}),
        (1024, 128, 16, {"versus": 1.0}),
        (1024, 128, 64, {"versus": 1.0}),
    ):
        name = f"{shared} + {own} B{batch}"
        kv_len = (shared + own,) * batch
        single = Case(f"{name}, single format", (1,) * batch, kv_len, prefix=shared)
        both = {"form": "cascade", "peers": ("flashinfer",), "floor": True, "versus": single.name, "at_least": bar}
        rows += [single, _named(name, single, **both)]
    return tuple(rows)


def _rope() -> tuple[Case, ...]:
    rows = []
    for n, batch in ((4096, 16), (16384, 4)):
        base = _decode("constant", n, batch, peers=("flashinfer",))
        own = {"versus": base.name}
        at_least = {"versus": 1 / 1.1, "rotation": 1.6}
        rows += [base]
        rows += [_named(f"{base.name}, rope", base, variant="rope", peers=("flashinfer",), at_least=at_least, **own)]
        turned = f"{base.name}, rope interleaved"
        rows += [_named(turned, base, variant="rope interleaved", at_least={"versus": 1 / 1.1}, **own)]
    return tuple(rows)


def _quantized() -> tuple[Case, ...]:
    """Keys of 8 bits are to take bfloat16's time over 1.7: 0.85 of its bytes a second."""
    rows = []
    for n, batch in ((1024, 16), (8192, 16), (4096, 64)):
        base = _decode("constant", n, batch)
        rows.append(_named(base.name, base, floor=True))
        own = {"versus": base.name, "at_least": {"versus": 0.85}, "floor": True}
        for dtype in ("float8_e4m3fn", "float8_e5m2"):
            rows.append(_named(f"{base.name}, {dtype}", base, kv_dtype=dtype, **own))
        own["at_least"] = {"versus": 0.8}
        rows.append(_named(f"{base.name}, token scales", base, kv_dtype="float8_e4m3fn", scales="token", **own))
    base = _prefill(4096, at_least={})
    rows.append(_named(base.name, base))
    rows.append(_named(f"{base.name}, float8_e4m3fn", base, kv_dtype="float8_e4m3fn", versus=base.name))
    return tuple(rows)


def _mla() -> tuple[Case, ...]:
    """DeepSeek's heads with absorbed weights, all on one GPU or on eight."""
    rows = []
    for heads, unit in ((16, "GB/s"), (128, "TFLOP/s")):
        for n, batch in ((8192, 1), (1024, 16), (8192, 16), (4096, 64), (4096, 128)):
            at_least = {(16, 128): {"flashinfer": 1.05}, (128, 64): {"flashinfer": 1.2}}.get((heads, batch), {})
            own = {"page_size": 64, "latent": 512, "unit": unit, "peers": ("flashinfer",), "floor": heads == 16}
            name, shape = f"{heads} heads, {n} B{batch}", (heads, 1, 576)
            rows.append(Case(name, (1,) * batch, (n,) * batch, shape, at_least=at_least, **own))
    return tuple(rows)


def _quest() -> tuple[Case, ...]:
    def row(context: int, pages: int) -> Case:
        name = f"{pages} pages of {context // 1024}k"
        kept = {"form": "blocks", "blocks": pages, "variant": "plain", "peers": ("flashinfer",), "floor": True}
        own = {"versus": f"{pages} pages of 16k"} if context > 16384 else {}
        at_least = {"flashinfer": 1.0, **({"versus": 0.95} if own else {})}
        return Case(name, (1,), (context,), (32, 32, 128), at_least=at_least, **kept, **own)

    return tuple(row(context, pages) for context in (16384, 32768) for pages in (64, 128, 256, 512))


def _long() -> tuple[Case, ...]:
    bars = ((32768, 0.92), (131072, 0.97), (524288, 0.99))
    rows = (_decode("constant", n, 1, peers=("flashinfer",), at_least={"floor": bar}) for n, bar in bars)
    return tuple(rows)


_SMALL_DECODE = Case("decode, 512 keys", (1,) * 4, (512,) * 4, peers=("flashinfer", "flex"))
_SMALL_PREFILL = Case(
    "prefill, 256 rows", (256,) * 2, (256,) * 2, _MHA, form="ragged", unit="TFLOP/s", peers=("flashinfer", "flex")
)
_SMALL_MIXED = Case("65, 1 and 1 rows", (65, 1, 1), (300, 700, 129), peers=("flashinfer",))
_SMALL_PREFIX = Case("prefix 512 + 64", (1,) * 8, (576,) * 8, form="cascade", prefix=512, peers=("flashinfer",))
_SMALL_MLA = Case(
    "MLA, 512 keys", (1,) * 4, (512,) * 4, (16, 1, 576), page_size=64, latent=512, peers=("flashinfer",)
)
_SMALL_BLOCKS = Case("12 of 64 pages", (1,), (1024,), (32, 32, 128), form="blocks", blocks=12, variant="plain")
_HOST_ROWS = ("plan B16", "plan B256", "run", "run out=", "flex call", "32 layers, eager, B16")
_PLANNER_ROWS = ("update on the GPU, B256", "update on the GPU, prefixes found", "decode, 64 share 8192, prefix found")

SECTIONS: tuple[Section, ...] = (
    Section("decode", "Decode, 32/8/128, pages of 16", _first_table(), _SMALL_DECODE),
    Section("decode-pages", "Page sizes", _pages()),
    Section("decode-families", "Decode on the kernels that are chosen, and on each family", _decode_families()),
    Section("decode-variants", "Decode variants at 8192 B16", _decode_variants()),
    Section("prefill", "Prefill, B16 H16 D128, causal", _prefill_rows(), _SMALL_PREFILL),
    Section("prefill-ragged", "Prefill of ragged batches, 32/8/128", _prefill_ragged()),
    Section("prefill-variants", "Prefill variants, B16 H16 D128", _prefill_variants()),
    Section("prefill-dims", "Prefill at other head dims, causal", _prefill_dims()),
    Section("flex", "Calls with masks and scores in Python, H16 D128", _flex()),
    Section("mixed", "Mixed batches, pages of 16", _mixed(), _SMALL_MIXED),
    Section("prefix", "Shared prefixes, decode", _prefix(), _SMALL_PREFIX),
    Section("rope", "Decode with fused RoPE", _rope()),
    Section("quantized", "K and V of 8 bits", _quantized()),
    Section("mla", "MLA decode, 576/512, pages of 64", _mla(), _SMALL_MLA),
    Section("quest", "Selected pages, 32/32/128", _quest(), _SMALL_BLOCKS),
    Section("long", "One long request", _long()),
    Section("plan", "Planning: a serving step's host time, and plans made on the GPU", rows=_HOST_ROWS + _PLANNER_ROWS),
    Section("first-use", "First use, new processes", rows=("cold cache", "warm cache")),
)


def chosen(names: Sequence[str]) -> list[Section]:
    """Sections by name, or by a pattern such as "decode*". All where none is named.

    Raises ValueError for a name that fits none.
    """
    for name in names:
        if not any(fnmatchcase(section.name, name) for section in SECTIONS):
            known = ", ".join(section.name for section in SECTIONS)
            raise ValueError(f"no section fits {name!r}; expected some of: {known}")
    return [s for s in SECTIONS if not names or any(fnmatchcase(s.name, name) for name in names)]
