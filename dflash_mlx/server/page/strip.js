// The strip under an answer: tokens a second, acceptance length, and a bar for each round.

import { byId, svg } from "./dom.js";

const HEIGHT = 40,
  BAR = 6,
  GAP = 2;
const LEAST = 8; // rows of a round's bar, so that short rounds look short
const MOST = 24;

/** The figures of rounds, each [tokens, drafted, accepted], as the server counts them. */
export function totals(rounds) {
  const drafted = rounds.filter((round) => round[1] > 0);
  const sum = (list, i) => list.reduce((total, round) => total + round[i], 0);
  return {
    rounds: rounds.length,
    tokens: sum(rounds, 0),
    drafts: sum(rounds, 1),
    kept: sum(rounds, 2),
    // As the papers have it: over the rounds with drafts.
    acceptanceLength: drafted.length ? sum(drafted, 0) / drafted.length : null,
  };
}

export class Strip {
  constructor() {
    this.rounds = [];
    this.bars = byId("bars");
    new ResizeObserver(() => this.draw()).observe(this.bars);
  }

  /** A new answer begins. */
  begin() {
    this.rounds = [];
    this.tokens = this.firstTokens = 0;
    this.firstAt = null;
    this.show({ speed: null });
  }

  /** A round arrived. */
  add(round) {
    const now = performance.now();
    this.rounds.push(round);
    this.tokens += round[0];
    if (this.firstAt === null) {
      this.firstAt = now;
      this.firstTokens = this.tokens;
    }
    const seconds = (now - this.firstAt) / 1000;
    this.show({ speed: seconds > 0.05 ? (this.tokens - this.firstTokens) / seconds : null });
  }

  /** An answer that is there already; `speed` as the server measured it. */
  set(rounds, speed) {
    this.rounds = rounds;
    this.show({ speed });
    const { drafts, kept, acceptanceLength, tokens } = totals(rounds);
    const drafting = drafts
      ? `${kept} of ${drafts} drafts kept, acceptance length ${acceptanceLength.toFixed(2)}`
      : "no drafts";
    this.bars.setAttribute("aria-label", `${rounds.length} rounds for ${tokens} tokens; ${drafting}`);
  }

  hide() {
    byId("strip").hidden = true;
  }

  show({ speed }) {
    this.speed = speed;
    const { rounds, acceptanceLength } = totals(this.rounds);
    byId("strip").hidden = false;
    byId("speed").textContent = speed ? speed.toFixed(1) : "–";
    byId("length").textContent = acceptanceLength ? acceptanceLength.toFixed(2) : "–";
    byId("rounds").textContent = rounds || "–";
    this.draw();
  }

  /** The newest rounds that fit, the last one at the right. */
  draw() {
    const width = this.bars.clientWidth;
    const shown = this.rounds.slice(-Math.max(1, Math.floor((width + GAP) / (BAR + GAP))));
    const rows = Math.min(MOST, Math.max(LEAST, ...shown.map(([tokens, drafted]) => Math.max(tokens, drafted + 1))));
    const unit = HEIGHT / rows;
    const parts = [];
    shown.forEach(([tokens, drafted, accepted], i) => {
      const bar = (from, to, kind) => {
        const top = Math.max(0, HEIGHT - to * unit);
        const height = Math.max(1, HEIGHT - from * unit - top - (kind === "own" ? 0 : 0.5));
        parts.push(svg("rect", { x: i * (BAR + GAP), y: top, width: BAR, height, rx: 1, class: kind }));
      };
      const kept = Math.min(accepted, tokens);
      if (drafted > accepted) bar(1 + accepted, 1 + drafted, "refused");
      if (kept) bar(1, 1 + kept, "kept");
      bar(0, 1, "own");
    });
    this.bars.replaceChildren(...parts);
  }
}
