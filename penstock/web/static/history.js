// Conversations in this browser's localStorage: the latest ones, up to a number and a size.

const NAME = "penstock.chats";
export const MAX_CONVERSATIONS = 60;
export const MAX_CHARACTERS = 2_000_000; // browsers give a site about five million

export function newConversation(from) {
  return {
    id: crypto.randomUUID ? crypto.randomUUID() : String(Math.random()).slice(2),
    title: "", updated: Date.now(),
    models: from?.models || [], system: from?.system || "", params: { ...(from?.params || {}) }, turns: [],
  };
}

export function conversations() {
  try {
    const found = JSON.parse(localStorage.getItem(NAME) || "[]");
    return Array.isArray(found) ? found.filter((one) => one?.id && Array.isArray(one.turns)) : [];
  } catch {
    return [];
  }
}

export function save(conversation) {
  conversation.updated = Date.now();
  const others = conversations().filter((one) => one.id !== conversation.id);
  store([conversation, ...others].slice(0, MAX_CONVERSATIONS));
}

export function remove(id) {
  store(conversations().filter((one) => one.id !== id));
}

export function removeAll() {
  localStorage.removeItem(NAME);
}

// Log-probabilities are not kept, and of an answer that runs what is there of it; the oldest conversations go when there
// is no room.
function store(all) {
  const kept = [...all];
  while (kept.length) {
    const text = JSON.stringify(kept, (name, value) => {
      if (name === "tokens" || name === "running") return undefined;
      return value?.running ? { ...value, finish: "stopped" } : value;
    });
    if (text.length <= MAX_CHARACTERS) {
      try {
        localStorage.setItem(NAME, text);
        return;
      } catch { /* the browser has less room */ }
    }
    kept.pop();
  }
  localStorage.removeItem(NAME);
}

// The messages that a model gets for its next answer: the turns up to `end`, each with this model's own answers.
export function messagesOf(conversation, model, end) {
  const messages = conversation.system.trim() ? [{ role: "system", content: conversation.system }] : [];
  conversation.turns.slice(0, end + 1).forEach((turn, index) => {
    if (turn.results) {
      for (const [id, content] of Object.entries(turn.results[model] || {})) messages.push({ role: "tool", tool_call_id: id, content });
    } else {
      messages.push({ role: "user", content: turn.text });
    }
    const answer = turn.answers[model];
    if (index === end || !answer || (!answer.content && !answer.calls?.length)) return;
    const message = { role: "assistant", content: answer.content || null };
    if (answer.calls?.length) {
      message.tool_calls = answer.calls.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text } }));
    }
    messages.push(message);
  });
  return messages;
}
