"""Opening ONNX Runtime's session over a model's graph, as this cache and these matmuls need it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from edgekv.engines.onnx import native
from edgekv.engines.onnx.binding import Array
from edgekv.engines.onnx.options import PROVIDERS, OnnxOptions, Operator
from edgekv.errors import DependencyMissing, EngineError, UnsupportedModel
from edgekv.kv.scales import KVScales
from edgekv.kv.spec import KVSpec
from edgekv.model.converted import ConvertedModel
from edgekv.uninterrupted import uninterrupted

if TYPE_CHECKING:
    import onnx


def open_session(
    model: ConvertedModel,
    kv: KVSpec,
    options: OnnxOptions,
    attention: Operator,
    scales: KVScales | None = None,
) -> tuple[Any, Array | None]:
    """An ONNX Runtime session over the model's graph, given this kind of cache and attention.

    Returns the packed weights that are to be bound, too; None where MatMulNBits has its own.

    Raises:
        DependencyMissing, EngineError: ONNX Runtime lacks the provider, or cannot load the graph.
        UnsupportedModel: the matmul that was asked for cannot be used.
    """
    ort = _import_onnxruntime(PROVIDERS[options.device])
    session_options = _session_options(ort, options.threads)
    graph: str | bytes = str(model.graph)
    own_matmul, own_table = _own_matmul(options), _own_table(options)
    weights, tables = None, False
    as_stored = kv.dtype == "int8" and kv.granularity != "tensor" and options.accuracy_level == 4 and not options.half
    if attention == "native" or own_matmul or own_table or not as_stored or model.is_foreign:
        made, place = _other_graph(model, kv, options, attention, scales)
        weights = _packed(made, place, options.threads) if own_matmul else None
        tables = own_table and _with_tables(made)
        graph = bytes(made.SerializeToString())
        session_options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(place))
    try:
        if attention == "native" or weights is not None or tables:
            session_options.register_custom_ops_library(str(native.library()))
        return ort.InferenceSession(graph, session_options, providers=[PROVIDERS[options.device]]), weights
    except Exception as error:  # ONNX Runtime raises a class of its own per status code
        raise EngineError(f"ONNX Runtime cannot load {model.graph} with its weights: {error}") from error


def _own_matmul(options: OnnxOptions) -> bool:
    """Whether edgekv's own matmul takes the place of MatMulNBits."""
    if options.matmul == "onnxruntime":
        return False
    suits = options.device == "cpu" and options.accuracy_level == 4
    if options.matmul == "auto":
        return suits and native.matmul_refusal() is None
    reason = native.unavailable() if suits else "it runs on the CPU, with inputs rounded to 8 bits"
    if reason is not None:
        raise UnsupportedModel(f"The native matmul with packed weights cannot be used: {reason}.")
    return True


def _own_table(options: OnnxOptions) -> bool:
    """Whether edgekv's own matmul takes the place of MatMulBnb4; it is as exact at every accuracy level."""
    return options.matmul != "onnxruntime" and options.device == "cpu" and native.table_refusal() is None


def _with_tables(graph: onnx.ModelProto) -> bool:
    from edgekv.engines.onnx.table import set_table_matmul

    return set_table_matmul(graph)


def _packed(graph: onnx.ModelProto, folder: Path, threads: int) -> Array | None:
    from edgekv.engines.onnx.packed import set_packed_matmul

    return set_packed_matmul(graph, folder, threads)


def _other_graph(
    model: ConvertedModel,
    kv: KVSpec,
    options: OnnxOptions,
    attention: Operator,
    scales: KVScales | None,
) -> tuple[onnx.ModelProto, Path]:
    """The stored graph has an INT8 cache with a scale a channel; any other kind is made from it in memory.

    Returns the folder that its weights' places are relative to, too."""
    with uninterrupted():
        from edgekv.engines.onnx import adapt

    graph, folder = load_graph(model)
    adapt.set_cache(graph, kv.dtype, kv.granularity)
    adapt.set_accuracy_level(graph, options.accuracy_level)
    if options.half:
        adapt.set_half_attention(graph)
    if attention == "native":
        centred = adapt.WHOLE if scales is None else adapt.Centred.by(scales)
        adapt.set_native_attention(graph, model.spec, kv.dtype, centred)
    return graph, folder


def load_graph(model: ConvertedModel) -> tuple[onnx.ModelProto, Path]:
    """A model's graph as edgekv runs it, its large weights left in their files, and the folder that those lie in."""
    import onnx

    from edgekv.engines.onnx.foreign import adapt_foreign

    if model.is_foreign:
        adapted = adapt_foreign(model.graph)
        return adapted.model, adapted.folder
    return onnx.load(model.graph, load_external_data=False), model.folder


def _session_options(ort: Any, threads: int) -> Any:
    made = ort.SessionOptions()
    made.intra_op_num_threads = threads
    made.log_severity_level = 3
    made.enable_mem_pattern = False  # shapes change from run to run, so patterns would only cost memory
    return made


def _import_onnxruntime(provider: str) -> Any:
    """ONNX Runtime, if it has this execution provider."""
    try:
        with uninterrupted():
            import onnxruntime
    except ImportError as error:
        raise DependencyMissing(
            f"ONNX Runtime cannot be imported ({error}). Install exactly one of: pip install onnxruntime (CPU), "
            "or pip install onnxruntime-gpu (NVIDIA)."
        ) from error
    if not hasattr(onnxruntime, "InferenceSession"):
        raise DependencyMissing(
            "The onnxruntime package is there but empty, as happens when onnxruntime and onnxruntime-gpu were both "
            "installed and one removed: pip uninstall both, then install the one you need."
        )
    if provider not in onnxruntime.get_available_providers():
        raise DependencyMissing(
            f"This onnxruntime has no {provider}. Install the build that has it: "
            "pip uninstall onnxruntime && pip install 'edgekv[cuda]'."
        )
    return onnxruntime
