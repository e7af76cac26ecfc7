"""The texts of the tokens that frame turns, by which they are found where a checkpoint does not name them.

What ends an answer is often not said: public GGUF files of Gemma 2, Phi-3 and Phi-4-mini name the end of a text alone,
and so do folders without generation_config.json. The lists follow llama.cpp's. A text alone says nothing of a model: it
counts where its token is a control token there, or where the chat template writes it.
"""

from __future__ import annotations

ENDS = frozenset(
    {
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|end_of_turn|>", "<|endoftext|>",
        "<|end_of_text|>", "<EOT>", "_<EOT>", "<\uff5cend\u2581of\u2581sentence\uff5c>",
    }
)  # fmt: skip
"""Tokens that end an answer."""

MARKS = ENDS | {
    "<|system|>", "<|user|>", "<|assistant|>", "<|tool|>", "<|/tool|>", "<|im_start|>", "<|im_sep|>",
    "<start_of_turn>", "<|start_header_id|>", "<|end_header_id|>", "<|begin_of_text|>", "<|start_of_role|>",
    "<|end_of_role|>",
}  # fmt: skip
"""Tokens that make the frame of a turn: what a user types must never become one."""
