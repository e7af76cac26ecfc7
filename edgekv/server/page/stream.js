// Pure parts of the page, without a document: server-sent events, a little Markdown, numbers as text.
// tests/server/test_page.py runs them on their own as well as in a browser.

/** Splits a stream of text into server-sent events: {data} or {comment}. */
export class EventParser {
  #held = "";

  /** Takes more text, gives the events that are complete. */
  put(text) {
    this.#held = (this.#held + text).replaceAll("\r\n", "\n");
    const parts = this.#held.split("\n\n");
    this.#held = parts.pop();
    return parts.flatMap((part) => this.#event(part));
  }

  #event(part) {
    const lines = part.split("\n");
    const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).replace(/^ /, ""));
    if (data.length) return [{ data: data.join("\n") }];
    return lines.filter((line) => line.startsWith(":")).map((line) => ({ comment: line.slice(1).trim() }));
  }
}

/** Events of a fetch response's body. */
export async function* eventsOf(body) {
  const parser = new EventParser();
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    yield* parser.put(value);
  }
}

/** Fenced code and paragraphs, in order: {kind: "code" | "text", text}. A fence that is still open is code. */
export function blocksOf(text) {
  const blocks = [];
  let lines = [];
  let fence = null;
  const end = (kind) => {
    const joined = lines.join("\n");
    lines = [];
    if (kind === "code") blocks.push({ kind, text: joined });
    else joined.replace(/^\n+|\n+$/g, "").split(/\n{2,}/).filter((part) => part.trim())
      .forEach((part) => blocks.push({ kind, text: part }));
  };
  for (const line of text.split("\n")) {
    const mark = /^\s{0,3}(`{3,}|~{3,})/.exec(line)?.[1];
    if (fence === null && mark) {
      end("text");
      fence = mark;
    } else if (fence !== null && mark?.startsWith(fence)) {
      end("code");
      fence = null;
    } else {
      lines.push(line);
    }
  }
  end(fence === null ? "text" : "code");
  return blocks;
}

/** A paragraph's spans: {kind: "plain" | "code" | "strong", text}. */
export function spansOf(text) {
  const spans = [];
  let at = 0;
  for (const match of text.matchAll(/`([^`\n]+)`|\*\*([^*\n]+)\*\*/g)) {
    if (match.index > at) spans.push({ kind: "plain", text: text.slice(at, match.index) });
    spans.push(match[1] === undefined ? { kind: "strong", text: match[2] } : { kind: "code", text: match[1] });
    at = match.index + match[0].length;
  }
  if (at < text.length) spans.push({ kind: "plain", text: text.slice(at) });
  return spans;
}

/** 1536 -> "1.5 KiB". */
export function bytesAsText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (bytes >= 1024 && unit < units.length - 1) {
    bytes /= 1024;
    unit += 1;
  }
  return `${unit && bytes < 10 ? bytes.toFixed(1) : Math.round(bytes)} ${units[unit]}`;
}
