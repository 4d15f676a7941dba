// ---- The pool: each cell is a block, each colour a request ----

const GUTTER = 44 // pixels left of the cells, for the number of each row's first block
const THEME = "paper later ink quiet free cached held strong accent error good".split(" ")
const TONES = ["fill", "pale", "strong", "cached"] // each a lightness and chroma, for every hue
const dark = matchMedia("(prefers-color-scheme: dark)")
const theme = {}
const view = { at: -1, isNews: true, told: -Infinity } // what was last drawn
let palette = []
let ctx // context of the canvas being drawn on
let grid // layout of the first `shown` blocks; null if it must be computed again
let ages // the shade in which each cached block was last drawn, 0 to 5
let pointed // the block under the pointer, or the one selected with the arrow keys

const idOf = r => `${state.engine}/${r}`
const shadesOf = id => palette[tape.hues.get(id)] ?? theme // for requests without a hue

function colour(element, r) { // page.css derives the shades from the hue
  element.style.setProperty("--hue", tape.hues.get(idOf(r)) ?? "")
}

function mixColours() {
  const style = getComputedStyle(document.body)
  for (const name of THEME) theme[name] = style.getPropertyValue(`--${name}`)
  palette = Array.from({ length: NUM_HUES }, (_, i) => Object.fromEntries(TONES.map(name =>
    [name, `oklch(${style.getPropertyValue(`--${name}-tone`)} ${20 + 150 * i})`])))
}

function forgetDrawing() { // also updates the texts immediately, because the layout depends on them
  grid = null
  view.told = -Infinity
}

function fit(canvas) { // give the canvas one pixel per screen pixel
  const { clientWidth: width, clientHeight: height } = canvas
  canvas.width = width * devicePixelRatio
  canvas.height = height * devicePixelRatio
  ctx = canvas.getContext("2d")
  ctx.scale(devicePixelRatio, devicePixelRatio)
  ctx.font = "11px system-ui"
  ctx.textBaseline = "middle"
  return { ctx, width, height }
}

function layOut() { // a power of two columns, so that rows begin at round numbers; wide cells
  mixColours()
  const { width, height } = fit($("pool"))
  const { num_blocks } = state
  const n = 1.5 * tape.shown < num_blocks ? tape.shown : num_blocks
  const wide = Math.max(1, width - GUTTER - 14) // width is 0 while a phone shows another section
  const high = Math.max(1, height - 10)
  const columns = 2 ** Math.floor(Math.log2((n * wide) / high) / 2)
  const whole = x => Math.max(1, Math.floor(x * devicePixelRatio)) / devicePixelRatio
  const w = whole(Math.min(240, wide / columns))
  const h = whole(Math.min(110, high / Math.ceil(n / columns)))
  const gap = Math.min(2, Math.floor(Math.min(w, h) / 4))
  grid = { tape, ctx, shown: n, columns, w, h, gap }
  ages = new Int8Array(n).fill(-1)
  ctx.textAlign = "right"
  for (let row = 0; row * columns < n; row += Math.ceil(15 / h)) {
    write(theme.quiet, row * columns, GUTTER - 8, row * h + Math.max(6, h / 2))
  }
  ctx.textAlign = "left"
  state.touched = null
  paper = fit($("timeline"))
  $("effects").replaceChildren() // they belong to the previous layout
  showEffects(happened)
  setText("strip", n < num_blocks ? `${english(n)} to ${english(num_blocks - 1)}: free` : "")
}

function cellOf(block) {
  const { columns, w, h, gap } = grid
  return [GUTTER + (block % columns) * w, Math.floor(block / columns) * h, w - gap, h - gap]
}

function blockAt({ offsetX, offsetY }) {
  if (!grid) return
  const column = Math.floor((offsetX - GUTTER) / grid.w)
  const block = Math.floor(offsetY / grid.h) * grid.columns + column
  if (column >= 0 && column < grid.columns && block < grid.shown) return block
}

function drawPool() { // only cells that have changed, or cached ones whose shade has changed
  if (grid?.tape !== tape) layOut()
  ctx = grid.ctx
  const changed = state.touched ?? new Set(state.owners.keys())
  const idle = [...state.idle]
  idle.forEach((block, place) => {
    const age = Math.floor((6 * place) / idle.length)
    if (ages[block] !== age) changed.add(block)
    ages[block] = age
  })
  for (const block of changed) if (block < grid.shown) drawCell(block)
  state.touched = new Set()
}

function paint(colour, ...box) {
  ctx.fillStyle = colour
  ctx.fillRect(...box)
}

function write(colour, ...text) {
  ctx.fillStyle = colour
  ctx.fillText(...text)
}

function drawCell(block) {
  const box = cellOf(block)
  const owners = state.owners[block]
  ctx.clearRect(...box)
  if (!owners.length) drawIdle(block, box)
  else drawHeld(block, owners, box)
  writeText(block, box)
}

function drawIdle(block, box) {
  const isCached = state.idle.has(block)
  const { cached } = palette[state.last[block]?.[0].hue] ?? theme
  ctx.globalAlpha = isCached ? 0.4 + 0.12 * ages[block] : 1 // older blocks are paler
  paint(isCached ? cached : theme.free, ...box)
  ctx.globalAlpha = 1
}

function drawHeld(block, owners, [x, y, w, h]) {
  const seen = owners.slice(0, 4) // more stripes could not be told apart
  const high = h / seen.length
  seen.forEach(([q, logical], i) => {
    const top = y + i * high
    const part = clamp(q.filled / state.block_size - logical, 0, 1)
    paint(palette[q.hue].pale, x, top, w, high)
    paint(palette[q.hue].fill, x, top, w * part, high)
  })
  const [[{ r, hue }]] = owners
  ctx.strokeStyle = palette[hue].strong
  if (state.committed.has(block) && w > 4) ctx.strokeRect(x + 0.5, y + 0.5, w - 1, h - 1)
  const text = owners.length > 1 ? `×${owners.length}` : `${r}`
  const isRoom = h >= 12 && w >= 7 * text.length + 5
  if (isRoom) write(theme.ink, text, x + 4, y + Math.min(10, h / 2 + 0.5))
}

function writeText(block, [x, y, w, h]) { // as much text as fits below the number
  const lines = textOfBlock(block).match(RegExp(`.{1,${Math.ceil(w / 6)}}`, "gsu")) ?? []
  lines.slice(0, (h - 15) / 13).forEach((line, i) =>
    write(theme.ink, line, x + 4, y + 22 + 13 * i, w - 8))
}

// ---- Over the cells: highlights, a block table, and what has just happened ----

const centre = ([x, y, w, h]) => [x + w / 2, y + h / 2]
const corners = ([x, y, w, h]) => `M${x} ${y}h${w}v${h}h${-w}z`
const boxesOf = blocks => blocks.map(cellOf).map(corners).join("")

// Drawn from edge to edge so that it does not cover any numbers; later arrows are bent further.
function arrow(blocks, turn = 0) {
  const [[x, y], [u, v]] = blocks.map(cellOf).map(([x, y, w, h]) => [x + w / 2, y + h])
  const bend = Math.min((y + v) / 2 + 24 + 64 * turn, $("pool").clientHeight) // stays in the pool
  return `M${x} ${y}Q${(x + u) / 2} ${bend} ${u} ${v}`
}

function showEffects(events) { // page.css defines how each effect looks and ends
  happened = events.filter(event => event.blocks)
  if (!grid) return layOut()
  happened.forEach(({ kind, r, blocks }, turn) => {
    const path = $("effect").cloneNode()
    path.setAttribute("d", kind === "copied" ? arrow(blocks, turn) : boxesOf(blocks))
    path.className.baseVal = kind
    path.style.setProperty("--turn", turn)
    colour(path, r)
    path.onanimationend = ({ animationName }) => animationName === "fade" && path.remove()
    $("effects").append(path)
  })
}

function drawOver() {
  const all = `M${GUTTER} 0h9999v9999H${GUTTER}z`
  const moment = isLit(happened[0]?.r) ? happened : [] // includes blocks that were given back
  const tables = [...litRequests().map(tableOf), ...moment.map(event => event.blocks)]
  const blocks = new Set(tables.flat())
  $("dim").setAttribute("d", blocks.size ? all + boxesOf([...blocks]) : "")
  $("marked").setAttribute("d", pointed >= 0 ? boxesOf([pointed]) : "")
  $("chain").setAttribute("points", tableOf(chosen).map(cellOf).map(centre).join(" "))
}

// ---- The request that is highlighted everywhere, and the one that is selected ----

let lit // the request under the pointer
let chosen // the request shown in the drawer
let happened = [] // events at the current place
let staged = [] // the requests that a demo or the tour has stopped to show

function light(r) {
  if (r === lit) return
  lit = r
  view.isNews = true
}

const litRequests = () => (lit >= 0 ? [lit] : staged)
const tableOf = r => state.requests.get(r)?.table ?? []
const isLit = r => litRequests().includes(r)

// Show a text next to the cells. Highlight these requests while the pointer is not over anything.
function stage(text, requests = []) {
  staged = requests
  setText("moment", text)
  view.isNews = true
}

function leaveStage() {
  stage("")
  happened = []
  $("effects").replaceChildren()
}

function choose(r) {
  if ($("drawer").contains(document.activeElement)) $("pool").focus() // before it is hidden
  chosen = r
  $("drawer").hidden = r === undefined
  view.isNews = true
  fillDrawer()
}

const ownerOf = block => state.owners[block]?.[0]?.[0].r

function point(block, x, y) {
  mark(block)
  light(ownerOf(block))
  tip(block === undefined ? [] : wordsOfBlock(block), x, y)
}

function mark(block) { // mark a block, and the tokens in it
  if (pointed === block) return
  pointed = block
  view.isNews = true
  markTokens(block)
}

// [[request, logical block], ..]: the last owner of a cached block, none of a free block.
const usersOf = block =>
  state.idle.has(block) ? [state.last[block]].filter(Boolean) : state.owners[block] ?? []

function tip(words = [], x, y) {
  const box = $("tip")
  box.textContent = words.join("\n")
  box.style = `--x: ${x}px; --y: ${y}px`
}

const yours = q => `request ${q.r}${ownOf(q) ? " (yours)" : ""}`

function wordsOfBlock(block) {
  const { idle, block_size: size } = state
  const owners = state.owners[block]
  const place = [...idle].indexOf(block)
  const cached = place < 0 ? "free" : `cached, evicted after ${count(place, "other")}`
  const shared = owners.length > 1 ? `, shared ×${owners.length}` : ""
  const committed = state.committed.has(block) ? ", committed" : ""
  const who = owners.slice(0, 8).map(([q, i]) => `${yours(q)}: tokens ${i * size} to ` +
    `${i * size + size - 1}, ${clamp(q.filled - i * size, 0, size)} of ${size} slots filled`)
  const what = owners.length ? `held${shared}${committed}` : cached
  return [`Block ${block}: ${what}`, ...who, visible(textOfBlock(block))].filter(Boolean)
}

// The text in a block's slots, if one of this page's requests uses it and the names of its prompt
// tokens are known.
function textOfBlock(block) {
  const [q, i] = usersOf(block).find(([user]) => ownOf(user)?.prompt.names) ?? []
  if (!q) return ""
  const { prompt, names } = ownOf(q)
  const from = i * state.block_size
  const end = state.idle.has(block) ? Infinity : q.filled // a cached block is full
  return [...prompt.names, ...names].slice(from, Math.min(end, from + state.block_size)).join("")
}

function wordsOfRequest(q) {
  const { status, filled, target, generated, max_tokens, prompt, hits } = q
  return [
    yours(q).replace("r", "R"),
    status === "active"
      ? `answer: ${generated} of ${count(max_tokens, "token")}`
      : `${status}: ${filled} of ${target}`,
    `${count(prompt, "prompt token")}, ${hits} of them found in the cache`,
  ]
}

// ---- The drawer ----

function fillDrawer() {
  const q = state.requests.get(chosen)
  const [title, ...words] = q ? wordsOfRequest(q) : [`Request ${chosen}`, "It holds no blocks now."]
  setText("title", title)
  setText("status", words.join("\n"))
  $("parts").hidden = !q
  if (q) fillParts(q)
}

function fillParts(q) { // how many tokens are committed, computed and so on; and the block table
  const { block_size: size, underWay: line, committed } = state
  const isDecode = line && state.decodes.includes(q.r)
  const chunk = line?.chunks?.find(([r]) => r === q.r)?.[2] ?? 0
  const ends = {
    committed: size * (q.table.findLastIndex(block => committed.has(block)) + 1),
    computed: q.filled - chunk - isDecode,
    filled: q.filled,
    allocated: size * q.table.length,
  }
  let from = 0
  for (const [name, end] of Object.entries(ends)) {
    $(`part-${name}`).style.flexGrow = end - from
    setText(`end-${name}`, end)
    from = end
  }
  $("entries").replaceChildren(...q.table.map((block, i) => {
    const name = isGivenBack(q, i) ? "given back" : `${block} ${visible(textOfBlock(block))}`
    return make("li", {}, `${i} → ${name.trim()}`)
  }))
  colour($("about"), q.r)
}

// ---- Figures and texts ----

function draw(now) {
  const isReady = state.num_blocks || now > 1000 // give the server a second to answer
  const isAsleep = player.isLive && isReady && !chart.rows.size && !state.idle.size
  $("pool-empty").hidden = !isAsleep
  if (isAsleep) dream(now)
  else if (state.num_blocks) drawNews(now)
  if (now - view.told < 150) return // texts need not change sixty times a second
  view.told = now
  tellState()
  tellFigures(now)
  if (view.isTold) tellPlace()
  view.isTold = false
}

function drawNews(now) {
  if (view.at !== tape.at || !state.touched || !grid) {
    drawPool()
    followPlace()
    view.at = tape.at
    view.since = now
    view.isNews = true
    view.isTold = true
  }
  if (!view.isNews) return
  view.isNews = false
  drawTimeline()
  drawOver()
  markAnswers()
}

// Until something has run, the tour's record plays faintly in the pool, and the tour is offered.
let sleeper

function dream(now) {
  const awake = present()
  if (sleeper) restore(sleeper)
  else begin(tourLines().slice(1), false)
  const place = Math.floor(now / 100) % (tape.lines.length + 15) // pauses at the end
  moveTo(matchMedia("(prefers-reduced-motion: reduce)").matches ? 40 : place)
  drawPool()
  drawOver()
  sleeper = present()
  restore(awake)
}

function stateOf() {
  if (player.isLive && server.is !== "Live") return server.is
  if (player.isPaused) return "Paused"
  if (!player.isLive) return "Replay"
  if (!player.isBehind) return "Live"
  return isSlow() ? "Playing" : "Behind"
}

function setText(id, text) { // unchanged text is left alone, so a screen reader does not repeat it
  if ($(id).textContent !== `${text}`) $(id).textContent = text
}

const english = number => number.toLocaleString("en") // 32,768
const waiting = () => [...state.requests.values()].filter(({ status }) => status === "waiting")

function tellState() {
  const name = stateOf()
  const word = name === "Paused" ? `Paused at step ${state.step}` : name
  const running = state.requests.size - waiting().length
  const { model, machine, date } = player.isLive ? server : tape.title
  document.body.dataset.state = name
  document.body.classList.toggle("replay", !player.isLive)
  document.title = `${running && name === "Live" ? `● ${running} running` : word} – pagedGPT`
  setText("state", word)
  setText("where", {
    Playing: ` step ${stepsAfter(player.from) - stepsAfter(tape.at)} of ${stepsAfter(player.from)}`,
    Behind: ` by ${count(stepsAfter(tape.at), "step")}`,
  }[name] ?? "")
  setText("model", [tape.name, model, machine, date].filter(Boolean).join(" · "))
  $("speed").value = player.speed
  $("pause").ariaLabel = player.isPaused ? "Play" : "Pause"
}

function tellFigures(now) {
  const { num_blocks: n, requests, idle, totals } = state
  const held = state.owners.filter(({ length }) => length).length
  const parts = { held, cached: idle.size, free: n - held - idle.size }
  for (const part of $("bar").children) part.style.flexGrow = parts[part.className]
  const tokens = rate(now)
  const hitRate = Math.round((100 * totals["hit tokens"]) / totals["queried tokens"])
  const isKnown = !player.isLive || server.is === "Live"
  for (const [id, text] of Object.entries({
    held: english(held),
    of: `of ${english(n)} blocks held`,
    rest: `${english(parts.cached)} cached · ${english(parts.free)} free`,
    hits: `${hitRate || 0}%`,
    rate: isKnown && (tokens || !requests.size) ? english(tokens) : "–",
    waiting: waiting().length,
    preempted: totals.preemptions,
    size: n ? `${english(n)} blocks of ${state.block_size} tokens` : "",
  })) setText(id, text)
  $("steps-empty").hidden = chart.columns.length
}

function tellPlace() {
  Object.assign($("place"), { max: newest(), value: tape.at })
  setText("said", wordsOfColumn(columnShown()).join(" · "))
  drawMap()
  fillDrawer()
  // link to the current step, unless the page follows the engine or a reload shows other steps
  const isLinked = player.isLive ? player.isPaused : tape.name === INSIDE
  const link = isLinked ? `#step=${state.step}` : location.pathname + location.search
  if (location.hash || isLinked) history.replaceState(null, "", link)
}

function startPool() {
  const pool = $("pool")
  pool.onpointermove = event => point(blockAt(event), event.clientX, event.clientY)
  pool.onpointerleave = pool.onblur = () => point()
  pool.onclick = event => choose(ownerOf(blockAt(event)))
  pool.onkeydown = event => {
    if (!grid) return // not yet laid out
    const { columns } = grid
    const { key } = event
    const move = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns }[key]
    if (key === "Enter") choose(ownerOf(pointed))
    if (!move) return
    event.preventDefault() // so that the player does not step
    const block = clamp((pointed ?? -move) + move, 0, grid.shown - 1)
    const [x, y] = cellOf(block)
    const { left, top } = pool.getBoundingClientRect()
    point(block, left + x, top + y + grid.h)
  }
  for (const id of ["pool-panel", "steps-panel"]) new ResizeObserver(forgetDrawing).observe($(id))
  dark.onchange = forgetDrawing
}
