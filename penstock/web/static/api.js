// Requests to this server. Keys live in sessionStorage: they end with the browser tab.

const NAMES = { tenant: "penstock.key", admin: "penstock.admin" };

export function key(kind) {
  return sessionStorage.getItem(NAMES[kind]) || "";
}

export function setKey(kind, value) {
  if (value) sessionStorage.setItem(NAMES[kind], value);
  else sessionStorage.removeItem(NAMES[kind]);
}

export class ApiError extends Error {
  constructor(status, error, retryAfter) {
    super(error?.message || `the server answered with status ${status}`);
    this.status = status;
    this.code = error?.code;
    this.retryAfter = retryAfter;
  }
  get needsKey() { return this.status === 401 || this.code === "not_admin" || this.code === "admin_key"; }
}

// `as`: whose key is sent.
export async function send(path, { as = "tenant", method = "GET", body, headers = {}, signal } = {}) {
  const all = { ...headers };
  if (key(as)) all.authorization = `Bearer ${key(as)}`;
  if (body !== undefined) all["content-type"] = "application/json";
  const response = await fetch(path, { method, headers: all, body: body && JSON.stringify(body), signal, credentials: "omit" });
  if (response.ok) return response;
  let error;
  try { error = (await response.json()).error; } catch { /* a proxy's own page */ }
  throw new ApiError(response.status, error, response.headers.get("retry-after"));
}

export async function json(path, options) {
  return (await send(path, options)).json();
}

// Server-sent events: the `data` of each.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (rest + value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
        if (data.length) yield data.join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// What went wrong, for people.
export function explain(error) {
  if (error instanceof ApiError) {
    const wait = error.retryAfter ? ` Try again in ${error.retryAfter} s.` : "";
    return `${error.message[0].toUpperCase()}${error.message.slice(1)}.${wait}`.replace("..", ".");
  }
  if (error instanceof TypeError) return "The server cannot be reached.";
  return String(error.message || error);
}
