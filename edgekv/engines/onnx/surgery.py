"""A graph that is being edited: who makes a value, who reads it, what is constant; rename, add, and put in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import AttributeProto, helper, numpy_helper

from edgekv.engines.onnx.graphfile import tensor_array
from edgekv.errors import UnsupportedModel

Array = np.ndarray[Any, Any]

LINEAR = ("MatMul", "MatMulNBits", "MatMulBnb4", "Gemm", "FusedMatMul")
"""Operators that multiply by a matrix."""


def attribute(node: onnx.NodeProto, name: str, default: Any) -> Any:
    """A node's attribute, or the operator's default."""
    return next((helper.get_attribute_value(a) for a in node.attribute if a.name == name), default)


class GraphEdit:
    """A model whose nodes are taken out, indexed and changed; `commit` puts those that are needed back in order."""

    def __init__(self, model: onnx.ModelProto, path: Path, folder: Path) -> None:
        self.model, self.path, self.folder = model, path, folder
        self.nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
        self.tensors = {tensor.name: tensor for tensor in model.graph.initializer}
        self._index()

    def _index(self) -> None:
        self.producers: dict[str, onnx.NodeProto] = {}
        self.readers: dict[str, list[onnx.NodeProto]] = defaultdict(list)
        for node in self.nodes:
            self._enter(node)

    def _enter(self, node: onnx.NodeProto) -> None:
        self.producers.update({name: node for name in node.output if name})
        for name in filter(None, node.input):
            self.readers[name].append(node)

    def of_kind(self, kind: str) -> list[onnx.NodeProto]:
        """The nodes of one operator, in order."""
        return [node for node in self.nodes if node.op_type == kind]

    def producer(self, name: str, *kinds: str) -> onnx.NodeProto | None:
        """The node that makes a value, if it is of one of these kinds (any, if none are given)."""
        node = self.producers.get(name)
        return node if node is not None and (not kinds or node.op_type in kinds) else None

    def constant(self, name: str) -> Array | None:
        """A value that is the same in every run; None if it is not known to be."""
        if name in self.tensors:
            return tensor_array(self.tensors[name], self.folder)
        node = self.producers.get(name)
        if node is not None and node.op_type == "Identity":
            return self.constant(node.input[0])
        value = attribute(node, "value", None) if node is not None and node.op_type == "Constant" else None
        return None if value is None else numpy_helper.to_array(value)

    def inputs(self) -> dict[str, onnx.TypeProto.Tensor]:
        """The types of the graph's inputs."""
        return {value.name: value.type.tensor_type for value in self.model.graph.input}

    def rename(self, names: Mapping[str, str]) -> None:
        """Give values other names wherever they occur."""
        for places in [part for node in self.nodes for part in (node.input, node.output)]:
            for index, name in enumerate(places):
                if name in names:
                    places[index] = names[name]
        for value in [*self.model.graph.input, *self.model.graph.output, *self.tensors.values()]:
            value.name = names.get(value.name, value.name)
        self.tensors = {tensor.name: tensor for tensor in self.tensors.values()}
        self._index()

    def add(
        self, kind: str, inputs: Sequence[str], outputs: Sequence[str], *, domain: str = "", **attributes: Any
    ) -> str:
        """Add a node, wherever it belongs; returns its first output."""
        self.nodes.append(helper.make_node(kind, inputs, outputs, name=outputs[0], domain=domain, **attributes))
        self._enter(self.nodes[-1])
        return outputs[0]

    def remove(self, node: onnx.NodeProto) -> None:
        """Take a node out, because another makes its outputs."""
        self.nodes = [other for other in self.nodes if other is not node]
        for name in filter(None, node.output):
            del self.producers[name]
        for name in filter(None, node.input):
            self.readers[name] = [other for other in self.readers[name] if other is not node]

    def commit(self) -> None:
        """Put back the nodes and initializers that the outputs need, in topological order.

        Raises:
            UnsupportedModel: one of them has a graph of its own, or reads an input that is not declared.
        """
        graph = self.model.graph
        nodes = self._needed([value.name for value in graph.output], {value.name for value in graph.input})
        read = {name for node in nodes for name in node.input}
        tensors = [tensor for name, tensor in self.tensors.items() if name in read]
        kept = [onnx.TensorProto.FromString(tensor.SerializeToString()) for tensor in tensors]
        del graph.node[:], graph.initializer[:], graph.value_info[:]
        graph.node.extend(nodes)
        graph.initializer.extend(kept)

    def _needed(self, outputs: list[str], inputs: set[str]) -> list[onnx.NodeProto]:
        ordered: dict[int, onnx.NodeProto] = {}
        waiting: set[int] = set()
        stack = [(name, "the graph's outputs") for name in outputs]
        while stack:
            name, reader = stack[-1]
            node = self.producers.get(name)
            if node is None or id(node) in ordered:
                if node is None and name not in inputs and name not in self.tensors:
                    raise UnsupportedModel(f"{self.path}: {reader} still needs {name!r}, which edgekv does not give.")
                stack.pop()
            elif id(node) in waiting:
                ordered[id(node)] = node
                stack.pop()
            else:
                waiting.add(id(node))
                stack += [(each, f"{node.op_type} {node.name}") for each in node.input if each]
                self._refuse_subgraph(node)
        return list(ordered.values())

    def _refuse_subgraph(self, node: onnx.NodeProto) -> None:
        if any(a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) for a in node.attribute):
            raise UnsupportedModel(f"{self.path}: {node.op_type} {node.name} chooses between graphs while it runs.")


def linear_shapes(graph: GraphEdit) -> dict[str, tuple[int, int]]:
    """[out, in] of every multiplication by a stored matrix, by the name of its result."""
    shapes = {}
    for node in graph.nodes:
        if node.op_type in ("MatMulNBits", "MatMulBnb4"):
            shapes[node.output[0]] = (attribute(node, "N", 0), attribute(node, "K", 0))
        elif node.op_type in ("MatMul", "Gemm") and node.input[1] in graph.tensors:
            dims = list(graph.tensors[node.input[1]].dims)
            if len(dims) == 2:
                shapes[node.output[0]] = tuple(dims if attribute(node, "transB", 0) else dims[::-1])
    return shapes


def without_bias(graph: GraphEdit, name: str) -> str:
    """The product that a bias is added to; `name` itself if none is."""
    node = graph.producer(name, "Add")
    products = [] if node is None else [x for x in node.input if graph.producer(x, *LINEAR)]
    return products[0] if products else name
