// Colours for code: comments, strings, numbers and the words that most languages share. It guesses well enough for
// reading, and never changes the text.

const WORDS = new Set(
  `abstract and as assert async await begin break case catch class const continue def default defer del do done
  elif else elsif end enum esac except export extends extern false False fi final finally fn for foreach from func
  function global go if impl implements import in interface is lambda let local loop match mod module mut
  namespace new nil None nonlocal not null of or package pass private protected pub public raise rescue return
  select self SELECT FROM WHERE GROUP ORDER BY INSERT INTO VALUES UPDATE SET JOIN ON AND OR NOT NULL static struct
  super switch template then this throw throws trait true True try type typeof union unless until use using var
  virtual void where while with yield`.split(/\s+/),
);
const HASH = /^(?:py\w*|\w*sh|shell|console|ruby|rb|ya?ml|toml|perl|r|make\w*|dockerfile|elixir|julia|nim|conf|ini)$/i;
const DASHES = /^(?:sql|lua|haskell|hs|ada|elm)$/i;
const PLAIN = /^(?:|text|txt|plain|plaintext|output|markdown|md|diff|csv)$/i;
const STRING = String.raw`"""[\s\S]*?(?:"""|$)|'''[\s\S]*?(?:'''|$)|"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'|\`(?:\\.|[^\`\\])*\``;
const NUMBER = String.raw`(?<![\w$])\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?\w*`;
const WORD = String.raw`[A-Za-z_$][\w$]*`;
const LONGEST = 50000;

/** The code as text and coloured spans. */
export function colour(code, language) {
  if (PLAIN.test(language) || code.length > LONGEST) return [code];
  const comment = HASH.test(language)
    ? "#[^\\n]*"
    : DASHES.test(language)
      ? "--[^\\n]*"
      : "\\/\\/[^\\n]*|\\/\\*[\\s\\S]*?(?:\\*\\/|$)|<!--[\\s\\S]*?(?:-->|$)";
  const pattern = new RegExp(`(?<comment>${comment})|(?<string>${STRING})|(?<number>${NUMBER})|(?<word>${WORD})`, "g");
  const parts = [];
  let at = 0;
  for (const found of code.matchAll(pattern)) {
    const { comment, string, number, word } = found.groups;
    const kind = comment ? "comment" : string ? "string" : number ? "number" : WORDS.has(word) ? "keyword" : null;
    if (!kind) continue;
    const span = document.createElement("span");
    span.className = kind;
    span.textContent = found[0];
    parts.push(code.slice(at, found.index), span);
    at = found.index + found[0].length;
  }
  return [...parts, code.slice(at)].filter((part) => part !== "");
}
