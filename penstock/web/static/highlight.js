// Colours for code: comments, strings, numbers and the keywords that common languages share.

const MAX = 20000; // characters; longer code is shown without colours
const HASH = new Set(["python", "py", "bash", "sh", "shell", "zsh", "yaml", "yml", "toml", "ruby", "rb", "r", "dockerfile", "makefile", "perl"]);
const DASH = new Set(["sql", "lua", "haskell"]);
const SLASH = new Set(["js", "javascript", "ts", "typescript", "jsx", "tsx", "c", "cpp", "c++", "cc", "h", "hpp", "cuda", "cu", "rust", "rs", "go", "java", "kotlin", "swift", "css", "scss", "php", "json", "jsonc", "csharp", "cs", "scala", "dart"]);
const KEYWORDS = new Set(("and as assert async await break case catch class const constexpr continue def default defer del do elif else enum "
  + "except export extends extern false False final finally fn for from func function global go goto if impl implements import in "
  + "inline instanceof interface is lambda let loop match mod module mut namespace new nil None not null nullptr or package pass private "
  + "protected pub public raise return self static struct super switch template this throw throws trait true True try type typedef typename "
  + "undefined union unsafe use using var virtual void when where while with yield then fi done esac echo local "
  + "int float double bool boolean char long short unsigned string str "
  + "SELECT FROM WHERE GROUP BY ORDER JOIN ON INSERT INTO VALUES UPDATE SET DELETE CREATE TABLE LIMIT AND OR NOT NULL AS").split(" "));

const STRINGS = String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?|\x60(?:\\.|[^\x60\\])*\x60?`;
const REST = String.raw`\b\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?\b|[A-Za-z_$][\w$]*`;

export function highlight(text, language) {
  const comment = HASH.has(language) ? "#[^\\n]*" : DASH.has(language) ? "--[^\\n]*"
    : SLASH.has(language) ? String.raw`\/\/[^\n]*|\/\*[\s\S]*?(?:\*\/|$)` : null;
  if (!comment || text.length > MAX) return [text];
  const pattern = new RegExp(`(${comment})|(${STRINGS})|(${REST})`, "g");
  const nodes = [];
  let last = 0;
  for (const match of text.matchAll(pattern)) {
    const kind = match[1] ? "comment" : match[2] ? "string" : /^\d/.test(match[0]) ? "number" : KEYWORDS.has(match[0]) ? "keyword" : null;
    if (!kind) continue;
    if (match.index > last) nodes.push(text.slice(last, match.index));
    const span = document.createElement("span");
    span.className = `hl-${kind}`;
    span.textContent = match[0];
    nodes.push(span);
    last = match.index + match[0].length;
  }
  nodes.push(text.slice(last));
  return nodes;
}
