// Talking to the model: the transcript and its form, demos that stop at the moment they are about,
// and the guided tour. The pool itself is in state.js and pool.js. This is the last of the scripts,
// so at its end it defines what buttons, keys and files do, and starts everything.

// ---- This page's own requests ----

const calls = new Map() // call name -> its answers
const stops = new Set() // AbortControllers of running calls
const pageName = `page-${Math.random().toString(36).slice(2, 8)}`

// {element, number, ..}: the answer to a request, if this page sent it.
const ownOf = ({ name, r }) => calls.get(name)?.find(answer => answer.r === r)

// An answer has its request's colour while the request runs; later requests reuse that colour.
function markAnswers() {
  for (const answer of [...calls.values()].flat()) {
    const { r, element: { classList } } = answer
    const runs = ownOf(state.requests.get(r) ?? {}) === answer
    classList.toggle("lit", isLit(r))
    classList.toggle("runs", runs)
    if (!runs) continue
    answer.number.textContent = `request ${r}`
    colour(answer.element, r)
  }
}

// True if a block has the K, V of this token of an answer.
const isIn = ({ answer, i }, block) => usersOf(block).some(([q, logical]) =>
  ownOf(q) === answer && logical === Math.floor((q.prompt + i) / state.block_size))

function markTokens(block) { // mark the tokens in a block
  for (const token of document.querySelectorAll(".token")) {
    token.classList.toggle("here", isIn(token, block))
  }
}

// ---- Tokens and their probabilities ----

const END_TOKEN = /^<(\|.*\||\/?s|eos|pad|\w+_of_\w+)>$/

// A choice's new tokens, in a chat's format: [{token, logprob, top_logprobs: [{token, logprob}]}].
function scoredTokens({ logprobs }) {
  const { content, tokens = [], token_logprobs: scores, top_logprobs: tops } = logprobs ?? {}
  return content ?? tokens.map((token, i) => ({
    token,
    logprob: scores[i],
    top_logprobs: Object.entries(tops[i]).map(([token, logprob]) => ({ token, logprob })),
  }))
}

// A token that is only part of a character has a name such as "bytes:\xe2\x98". The character is
// returned with its last part.
function textOf(name, decoder) {
  if (!name.startsWith("bytes:\\x")) return name
  const bytes = Uint8Array.fromHex(name.slice(6).replaceAll("\\x", ""))
  return decoder.decode(bytes, { stream: true })
}

// A token's text with visible whitespace: "\n    if" becomes ↵␣×4if.
function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥")
    .replace(/ +/g, ({ length }) => (length > 1 ? `␣×${length}` : "␣"))
}

function addToken(answer, scores) {
  const text = textOf(scores.token, answer.decoder)
  const token = make("span", {
    className: END_TOKEN.test(scores.token) ? "token end" : "token",
    tabIndex: tabIndexOfTokens(),
    scores, answer, i: answer.names.length,
  }, text)
  token.style.setProperty("--surprise", 1 - Math.exp(scores.logprob))
  answer.names.push(text)
  answer.text.append(token)
  token.onpointerenter = token.onfocus = () => tellToken(token)
  token.onpointerleave = token.onblur = () => {
    mark()
    tip()
  }
}

// If probabilities are shown, Tab moves from token to token, and each token shows its alternatives.
const tabIndexOfTokens = () => $("probabilities").checked - 1 // 0 or -1

function tellProbabilities() {
  for (const token of document.querySelectorAll(".token")) token.tabIndex = tabIndexOfTokens()
}

// At temperature 0, the chosen token is the likeliest one that the schema allows.
function wordsOfToken({ scores, answer }) {
  const others = scores.top_logprobs.filter(({ token }) => token !== scores.token)
  return [scores, ...others].sort((a, b) => b.logprob - a.logprob).map(one => {
    const isRefused = answer.prompt.isHeld && one.logprob > scores.logprob
    const mark = one === scores ? "▸" : isRefused ? "✕" : " "
    return `${mark} ${(100 * Math.exp(one.logprob)).toFixed(1)}% ${visible(one.token)}`
  })
}

function tellToken(token) {
  mark(state.owners.findIndex((_, block) => isIn(token, block)))
  const { left, bottom } = token.getBoundingClientRect()
  if (token.tabIndex === 0) tip(wordsOfToken(token), left, bottom)
}

// ---- The transcript ----

function newAnswer(prompt) {
  const element = $("answer").content.firstElementChild.cloneNode(true)
  const [text, number, progress] = element.querySelectorAll(".text, b, span")
  const answer = { prompt, element, text, number, progress, names: [], said: "" }
  answer.decoder = new TextDecoder()
  element.onpointerenter = () => light(answer.r)
  element.onpointerleave = () => light()
  return answer
}

// Append a call's prompts and answers, folded if there are many. Returns the answers.
function addArticle(prompts, n) {
  const total = prompts.length * n
  const isFew = total <= 4
  const summary = make("summary", { hidden: isFew }, count(total, "answer"))
  const article = make("details", { open: isFew }, summary)
  $("articles").append(article)
  $("answers").scrollTop = 0 // the end, which stays in view, because it is laid out from there
  return prompts.flatMap(prompt => {
    const answers = Array.from({ length: n }, () => newAnswer(prompt))
    article.append(make("p", { className: "asked" }, prompt.text))
    article.append(...answers.map(({ element }) => element))
    return answers
  })
}

function tellProgress({ names: { length }, progress, reason }, most) {
  const all = count(length, "token")
  progress.textContent = {
    length: `stopped at ${all}`, stop: `ended after ${all}`, abort: "stopped",
  }[reason] ?? (most ? `${length} of ${count(most, "token")}` : all)
}

// ---- Calls ----

const tokenize = input => json("tokenize", { ...input, return_token_strs: true })

// Get the names of a prompt's tokens, to show in their blocks. Returns how many more tokens fit in
// the context.
async function nameTokens(prompt) {
  if (prompt.names) return
  const { messages, tools, text } = prompt
  const input = messages ? { messages, tools } : { prompt: text }
  const { token_strs, count, max_model_len } = await tokenize(input).catch(() => ({}))
  prompt.names = token_strs
  state.touched = null // draw all blocks again, with their text
  return max_model_len - count
}

let conversation = [] // the chat's messages so far

function knobs() { // stop, schema and tools are JSON; the server reports errors in them
  const inputs = [...document.querySelectorAll(".knobs [name]")].filter(({ value }) => value)
  const read = ({ type, value }) => (type === "number" ? Number(value) : parsed(value))
  const { json, ...fields } = Object.fromEntries(inputs.map(one => [one.name, read(one)]))
  return json ? { ...fields, structured_outputs: { json } } : fields
}

function parsed(text) {
  try {
    return JSON.parse(text)
  } catch {
    return text
  }
}

function curlOf(path, body) {
  const data = JSON.stringify(body).replaceAll("'", "'\\''")
  return `curl ${new URL(path, location)} --json '${data}'` +
    (key && ' -H "Authorization: Bearer $KEY"')
}

// An error without a code comes from the browser: the server is gone, perhaps in mid-answer.
const wordsOf = ({ code, message }) =>
  code === undefined ? "The server is not responding." : message

// Send prompts [{text, ids}, ..], or a chat's only one, {text, messages}, in a single call, because
// a browser has few connections. With several prompts, n is 1. The answers appear token by token.
// Returns whether the call succeeded, or null if it was stopped.
async function ask(prompts, fields) {
  const name = `${pageName}-${calls.size + 1}`
  const before = conversation
  const [{ messages }] = prompts
  const input = messages
    ? { messages, logprobs: true, top_logprobs: 5 }
    : { prompt: prompts.map(({ ids, text }) => ids ?? text), logprobs: 5 }
  const path = messages ? "v1/chat/completions" : "v1/completions"
  const body = { ...input, stream: true, ...fields }
  const answers = addArticle(prompts, fields.n ?? 1)
  answers.at(-1).progress.after(make("button", {
    hidden: !navigator.clipboard,
    onclick: () => navigator.clipboard.writeText(curlOf(path, body)),
  }, "copy as curl"))
  prompts[0].isHeld = fields.structured_outputs && fields.temperature === 0
  const stop = new AbortController()
  const { signal } = stop
  calls.set(name, answers)
  stops.add(stop)
  tellForm()
  let isWell = true
  try {
    // an unknown number is NaN, which is sent as null and means as many tokens as fit
    if (messages) body.max_tokens = clamp(body.max_tokens, 1, await nameTokens(prompts[0]))
    const answered = call(path, { body, name, signal })
    prompts.forEach(nameTokens)
    for await (const data of eventsOf(await answered)) {
      if (data !== "[DONE]") read(JSON.parse(data), answers, body.max_tokens)
    }
  } catch (thrown) {
    isWell = signal.aborted ? null : false
    if (signal.aborted) answers[0].element.closest("details").firstChild.append(", stopped")
    else $("articles").append(make("p", { className: "error" }, wordsOf(thrown)))
  }
  for (const answer of answers) {
    answer.reason ??= "abort"
    tellProgress(answer)
  }
  if (messages && answers[0].said && conversation === before) { // still the same chat
    conversation = [...messages, { role: "assistant", content: answers[0].said }]
  }
  stops.delete(stop)
  tellForm()
  return isWell
}

function read({ choices, error }, answers, most) {
  if (error) throw error
  for (const choice of choices) {
    const answer = answers[choice.index]
    for (const scores of scoredTokens(choice)) addToken(answer, scores)
    answer.said += choice.delta?.content ?? ""
    answer.reason = choice.finish_reason ?? answer.reason
    if (answer.names.length) tellProgress(answer, most)
  }
}

// ---- The form ----

function onFormKey(event) { // in a chat, Enter sends and Shift+Enter inserts a line break
  const isChat = event.target.matches('#ask:has([value="chat"]:checked) [name="prompt"]')
  const isAlone = isChat && !event.shiftKey && !event.isComposing
  if (event.key !== "Enter" || !(isAlone || event.ctrlKey || event.metaKey)) return
  event.preventDefault()
  $("ask").requestSubmit()
}

function tellForm() {
  const { kind: [text, chat], prompt, max_tokens } = $("ask").elements
  chat.disabled = !server.hasChat
  if (chat.disabled) text.checked = true
  prompt.defaultValue = chat.checked ? "" : "def" // shown until the user edits it
  max_tokens.defaultValue = chat.checked ? 512 : 64
  $("stop").disabled = !stops.size
  $("send").disabled = chat.checked && stops.size
}

async function send() {
  const { prompt, kind } = $("ask").elements
  const text = prompt.value
  if ($("send").disabled) return
  prompt.value = ""
  const messages = kind.value === "chat" && [...conversation, { role: "user", content: text }]
  const fields = knobs()
  const isWell = await ask([{ text, messages, tools: fields.tools }], fields)
  if (isWell === false) prompt.value ||= text // so that a refused prompt can be corrected
}

function stopAll() {
  for (const stop of stops) stop.abort()
}

function newChat() {
  stopAll()
  conversation = []
  $("articles").append(make("hr"))
  $("ask").elements.prompt.focus()
}

// ---- Demos ----

// Send prompts with `begin`, which gets the opening's tokens [[id, text], ..]. Then play slowly
// until this page's requests have had `times` events of this kind; `say` describes the first one.
// The demo has failed once all `many` requests have ended.
async function demonstrate(many, kind, times, say, begin) {
  const mine = new Set()
  const seen = []
  const until = (line, events) => {
    for (const { name, r } of line.new ?? []) if (calls.has(name)) mine.add(r)
    const ours = events.filter(({ r }) => mine.has(r))
    seen.push(...ours.filter(event => event.kind === kind))
    many -= ours.filter(event => event.kind === "ended").length
    if (seen.length < times) {
      if (many <= 0) finish("All requests ended before it happened. Try again on an idle server.")
      return false
    }
    stage(`${say(seen[0])} Paused: press ▶ to go on.`, seen.map(({ r }) => r))
    return true
  }
  const finish = text => {
    if (player.until !== until) return
    player.until = null
    stage(text)
  }
  if (!state.num_blocks) return setText("notice", "There is nothing to watch: no steps have come.")
  $("tab-pool").checked = true
  seek(Infinity, false)
  player.until = until
  stage("Playing at ten steps a second until it happens ..")
  try {
    const { tokens, token_strs } = await tokenize({ prompt: OPENING })
    if (!(await begin(tokens.map((id, i) => [id, token_strs[i]])))) finish("")
  } catch (error) {
    finish("")
    setText("notice", wordsOf(error))
  }
}

const OPENING = `class BlockPool:
    """The pool of KV blocks: each holds the keys and values of a few tokens, and any request may
    have any of them, in any order."""

    def __init__(self, num_blocks, block_size):
        self.block_size = block_size
        self.free = list(range(num_blocks))
        self.references = [0] * num_blocks

    def allocate(self):
        block = self.free.pop()
        self.references[block] = 1
        return block
`

function promptOf(tokens) {
  const names = tokens.map(([, name]) => name)
  return { ids: tokens.map(([id]) => id), names, text: names.join("") }
}

const demos = {
  // The first prompt computes the opening, three and a half blocks; the others find three of them.
  alike() {
    const S = state.block_size
    const say = ({ blocks: { length } }) =>
      `Seven requests have each found ${length * S} tokens in the cache, in ${length} blocks.`
    demonstrate(8, "hit", 7, say, async opening => {
      const { text } = promptOf(opening.slice(0, 3.5 * S))
      const [first, ...others] = "add sub mul div mod pow abs neg".split(" ").map(name =>
        ({ text: `${text}\ndef ${name}(` }))
      return await ask([first], { max_tokens: 4 }) && ask(others, { max_tokens: 32 })
    })
  },

  // The prompt's last block is half empty, and what the four answers write there cannot be shared.
  // The prompt skips the opening's first block, so that `alike` does not find this demo's blocks.
  fork() {
    const say = ({ r, blocks: [source, block] }) =>
      `Request ${r} must write into block ${source}, which it shares: it gets a copy, ${block}.`
    demonstrate(4, "copied", 1, say, opening => {
      const S = state.block_size
      const prompt = promptOf(opening.slice(S, 3.5 * S))
      return ask([prompt], { n: 4, temperature: 1, max_tokens: 40 })
    })
  },

  // The prompts just fit into the pool, and the answers do not.
  flood() {
    const { num_blocks: N, block_size: S, max_model_len: L, max_num_seqs } = state
    const many = clamp(Math.ceil((1.25 * N * S) / L), 4, max_num_seqs)
    const length = Math.min(L - S, Math.floor((0.97 * N) / many) * S) - 2
    const max_tokens = Math.min(L - length, 8 * S + 2)
    const say = ({ r, blocks: { length } }) =>
      `The pool was full, so request ${r} gave its ${length} blocks back, and now waits.`
    demonstrate(many, "preempted", 1, say, all => {
      const any = () => all[Math.floor(Math.random() * all.length)] // shares no blocks
      const prompt = () => promptOf(Array.from({ length }, any))
      return ask(Array.from({ length: many }, prompt), {
        max_tokens, temperature: 1, logprobs: 0, ignore_eos: true,
      })
    })
  },
}

// ---- The guided tour: captions [[step, request, text], ..] for a record of its own ----

const tourLines = () => readLines($("tour-lines").textContent)
let tour // {captions, at: index of the caption shown, home: what to return to}

function startTour() {
  const [{ tour: captions }, ...lines] = tourLines()
  leaveTour()
  tour = { captions, home: present() }
  listening.abort()
  begin(lines, false)
  $("tour").hidden = false
  $("tab-pool").checked = true
  showCaption(0)
  $("next").focus()
}

function showCaption(at) {
  if (at === tour.captions.length) return leaveTour()
  tour.at = Math.max(0, at)
  const [step, r, text] = tour.captions[tour.at]
  seek(stepPlace(step))
  stage("", [r])
  setText("caption", text)
  setText("caption-number", `${tour.at + 1} of ${tour.captions.length}`)
}

function leaveTour() { // restore everything; the server sends what has happened since
  if ($("tour").hidden) return
  $("tour").hidden = true
  leaveStage()
  restore(tour.home)
  forgetDrawing()
  view.isTold = true
  listenInSight()
}

// ---- What buttons, keys and files do ----

const clicks = {
  ...demos,
  stop: stopAll,
  "new-chat": newChat,
  "take-tour": startTour,
  "offer-tour": startTour,
  next: () => showCaption(tour.at + 1),
  previous: () => showCaption(tour.at - 1),
  leave: leaveTour,
  back: () => seekStep(-1),
  forth: () => seekStep(1),
  pause: togglePause,
  live: goLive,
  close: () => choose(),
  fit() { // all steps, if there are any yet
    chart.scale = (paper.width - LEFT - 30) / (chart.end || 1000)
    pan(0)
  },
}
// The visible button for a key. The tour's buttons take precedence over the player's.
function buttonOf(key) {
  const name = CSS.escape(key === " " ? "Space" : key)
  const buttons = [...document.querySelectorAll(`[aria-keyshortcuts~="${name}" i]`)]
  return buttons.find(button => button.checkVisibility())
}

function onKey(event) {
  const { key, target } = event
  const button = buttonOf(key)
  if (!button || isUsed(key, target)) return
  if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return
  event.preventDefault()
  button.click()
}

function isUsed(key, target) { // True if the browser itself uses this key here
  return target.closest(`textarea, select, input:not([type=range], [type=checkbox])
    ${key === " " ? ", button, summary, [type=checkbox]" : ""}`)
}

function start() {
  begin([], true)
  for (const [id, click] of Object.entries(clicks)) $(id).onclick = click
  $("place").oninput = () => seek($("place").valueAsNumber)
  $("speed").oninput = () => (player.speed = Number($("speed").value))
  $("probabilities").onchange = tellProbabilities
  $("key").onsubmit = takeKey
  $("ask").onsubmit = send
  // the browser shows its error message at the field, so unfold the settings
  $("settings").addEventListener("invalid", () => ($("settings").open = true), true)
  $("ask").onchange = tellForm
  $("ask").onkeydown = onFormKey
  onkeydown = onKey
  onhashchange = () => followLink()
  document.onvisibilitychange = listenInSight
  $("file").onchange = () => {
    const [file] = $("file").files
    replay(file.text(), file.name)
    $("file").value = "" // so that the same file can be opened again
  }
  startPool()
  startTimeline()
  requestAnimationFrame(frame)
  if ($("record")) replay($("record").textContent, INSIDE).then(onhashchange)
  else listenInSight()
}

start()
