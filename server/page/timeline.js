// ---- The timeline: each row is a request, each column a step ----

const LEFT = 60 // pixels for the row labels
const RULER = 22
const MOST_ROWS = 60 // with more rows, show how many requests run and wait, not each of them
const DENSE = { decodes: "held", chunks: "strong", waiting: "cached" } // colours, bottom to top
const FLAGS = { hit: "good", copied: "ink", preempted: "error", resumed: "accent" }
let chart
let paper // {ctx, width, height} of the timeline

function beginChart() {
  chart = {
    columns: [],
    rows: new Map(),
    shown: [], // the rows that are drawn
    end: 0, // total width of all columns, in units
    left: 0, // the unit at the left edge
    scale: 1, // pixels per unit
    follows: true,
    range: [], // the column under the pointer, or the first and last column of the range to sum
    loads: "", // SVG path of how many requests run at each place
  }
}

function rowOf(r) { // a row is created at the first call
  const { rows, columns } = chart
  const id = idOf(r)
  if (!rows.has(id)) rows.set(id, { id, r, first: columns.length, flags: [] })
  return rows.get(id)
}

function note(line, events) { // record what the timeline draws, when a line is first applied
  const { columns } = chart
  for (const { r } of [...(line.new ?? []), ...state.requests.values()]) {
    rowOf(r).last = columns.length
  }
  if (hasNumber(line) || line.event === "idle") {
    const column = newColumn(line)
    columns.push(column)
    addWidth(column)
    chart.loads += `V${-column.decodes.length - column.chunks.length}H${tape.at}`
  }
  const column = columns.at(-1)
  if (!column) return
  for (const { kind, r, text } of events) {
    column.told.push(`${r && `request ${r} `}${kind}: ${text}`)
    if (FLAGS[kind]) rowOf(r).flags.push({ column, kind })
  }
}

function newColumn({ step, time, chunks: told = [], sampled = 0 }) {
  const { engine, token_budget, decodes } = state
  const before = chart.columns.at(-1)
  const isRestart = before && before.engine !== engine
  const isStep = step >= 0
  const scale = Math.min(3, 160 / token_budget) // units per token
  let prompts = 0 // a step's chunks are drawn side by side, as on its flat token axis
  const chunks = told.map(([r, , n]) => {
    const from = 5 + prompts * scale
    prompts += n
    return { row: rowOf(r), from, w: Math.max(3, n * scale) }
  })
  // after a pause, it is not known when a step began
  const isTimed = isStep && before?.step >= 0 && !isRestart
  const ms = isTimed ? (time - before.time) * 1000 : 0
  const w = {
    tokens: 6 + (prompts && 5 + prompts * scale),
    time: Math.max(0.01, ms || before?.w.time || 1),
  }
  return {
    place: tape.at, engine, isRestart, step, time, ms, sampled, prompts, w, chunks,
    decodes: isStep ? decodes.map(rowOf) : [],
    waiting: waiting().map(({ r }) => rowOf(r)),
    told: [],
  }
}

function addWidth(column) {
  column.start = chart.end
  chart.end += column.w[$("widths").value]
  column.end = chart.end
}

function setWidths() {
  chart.end = 0
  chart.columns.forEach(addWidth)
}

const widthOf = ({ start, end }) => (end - start) * chart.scale
const xOf = ({ start }) => LEFT + (start - chart.left) * chart.scale
const endOf = column => xOf(column) + widthOf(column)
const unitAt = x => chart.left + (x - LEFT) / chart.scale
const columnAt = x =>
  Math.max(0, chart.columns.findLastIndex(({ start }) => start <= unitAt(x)))
const columnShown = () => chart.columns.findLastIndex(({ place }) => place <= tape.at)

// Tokens per second, over the last second before the current place, or over its step if that took
// longer.
function rate(now) {
  const isNow = player.isLive && tape.at === newest()
  const time = state.time + (isNow ? (now - view.since) / 1000 : 0)
  let tokens = 0
  let seconds = 0
  for (const one of chart.columns.slice(0, columnShown() + 1).reverse()) {
    if (seconds > 1 || one.engine !== state.engine) break
    tokens += one.sampled
    seconds = time - one.time + one.ms / 1000
  }
  return Math.round(tokens / Math.max(0.02, seconds))
}

const span = ms => // 0.7 ms, 45.98 s
  ms < 1000 ? `${+ms.toFixed(1)} ms` : `${english(+(ms / 1000).toFixed(2))} s`

function wordsOfRange(from, to) {
  if (!to) return wordsOfColumn(from)
  const range = chart.columns.slice(from, to + 1)
  const sum = read => range.reduce((total, one) => total + read(one), 0)
  const tokens = english(sum(({ prompts, decodes }) => prompts + decodes.length))
  const steps = `steps ${range[0].step ?? "idle"} to ${range.at(-1).step ?? "idle"}`
  return [`${steps}: ${tokens} tokens, ${span(sum(({ ms }) => ms))}`]
}

function wordsOfColumn(i) {
  if (!chart.columns[i]) return []
  const { step, chunks, decodes, waiting, prompts, ms, told } = chart.columns[i]
  if (step === undefined) return ["idle: nothing to do"]
  const parts = [
    `step ${step}: ${count(decodes.length, "decode")}`,
    prompts && `${count(chunks.length, "chunk")} with ${count(prompts, "token")}`,
    waiting.length && `${waiting.length} waiting`,
    ms && span(ms),
  ]
  return [parts.filter(Boolean).join(", "), ...told]
}

// ---- Drawing ----

function followPlace() { // keep the current place in view, unless the user has panned
  const column = chart.columns[columnShown()]
  const wide = (paper.width - LEFT - 30) / chart.scale
  if (!chart.follows || !column || wide < 0) return // below 0 if a phone shows another section
  if (column.start < chart.left) chart.left = column.start - wide / 8
  chart.left = Math.max(0, chart.left, column.end - wide)
}

function drawTimeline() {
  const { width, height } = paper
  ctx = paper.ctx
  const { columns, rows } = chart
  ctx.clearRect(0, 0, width, height)
  const first = columnAt(LEFT)
  const last = columnAt(width)
  const seen = columns.slice(first, last + 1)
  if (!seen.length) return // a phone may show another section
  const from = seen[0].place - 1
  $("sight").setAttribute("d", `M${from} 0H${seen.at(-1).place}V-9999H${from}z`)
  const bottom = height - 8 // bottom of the rows
  const all = [...rows.values()].filter(row => row.first <= last && row.last >= first)
  const isDense = all.length > MOST_ROWS
  chart.shown = isDense ? all.filter(({ r }) => isLit(r)) : all
  chart.rowHeight = isDense ? 20 : Math.min(26, (bottom - RULER) / all.length)
  chart.shown.forEach((row, i) => {
    row.y = RULER + i * chart.rowHeight
    row.alpha = isLit(row.r) || !litRequests().length ? 1 : 0.22
  })
  const high = (bottom - RULER - 24) / all.length // height per request if they are only counted
  $("steps").classList.toggle("dense", isDense)
  for (const column of seen) {
    if (isDense) drawCounts(column, bottom, high)
    else drawColumn(column)
  }
  chart.shown.forEach(drawFlags)
  ctx.globalAlpha = 1
  ctx.clearRect(0, 0, LEFT - 4, height)
  if (isDense) [0, all.length].forEach(n => write(theme.quiet, n, 30, bottom - n * high))
  if (chart.rowHeight > 8) chart.shown.forEach(drawLabel)
  drawRuler(seen)
  drawPlace(bottom)
  const [one, other = one] = chart.range.map(i => columns[i])
  $("range").style = one ? `left: ${xOf(one)}px; width: ${endOf(other) - xOf(one)}px` : ""
}

function drawLabel({ id, r, y }) {
  const high = chart.rowHeight
  paint(shadesOf(id).strong, 10, y + high / 2, 4, high / 3)
  write(theme.ink, r, 20, y + (2 * high) / 3)
}

function drawCounts(column, bottom, high) { // drawn instead of rows
  for (const [name, colour] of Object.entries(DENSE)) {
    const tall = column[name].length * high
    bottom -= tall
    paint(theme[colour], xOf(column), bottom, widthOf(column), tall)
  }
}

function drawMap() { // how many requests run at each place
  const { max_num_seqs: high = 1 } = state
  const wide = Math.max(0, newest())
  $("map").setAttribute("viewBox", `0 -${high} ${wide} ${high}`)
  $("loads").setAttribute("d", `M0 0${chart.loads}V0`)
}

function drawColumn(column) {
  const x = xOf(column)
  const wide = widthOf(column)
  const unit = wide / column.w.tokens
  const high = Math.min(12, 0.6 * chart.rowHeight) // leaves room above for flags
  const put = ({ id, y, alpha }, from, w, colour = shadesOf(id).strong) => {
    ctx.globalAlpha = alpha
    paint(colour, x + from * unit, y + chart.rowHeight - high - 2, w, high)
  }
  for (const row of column.decodes) put(row, 0, 4 * unit)
  for (const { row, from, w } of column.chunks) put(row, from, w * unit)
  for (const row of column.waiting) { // drawn hollow
    put(row, 0, wide + 0.5, theme.quiet)
    ctx.clearRect(x, row.y + chart.rowHeight - high - 1, wide + 0.5, high - 2)
  }
}

function drawFlags(row) { // above the boxes, in the shapes of the legend
  for (const { column, kind } of row.flags) {
    const x = xOf(column)
    ctx.globalAlpha = row.alpha
    paint(theme[FLAGS[kind]], x, row.y, 1, chart.rowHeight - 2)
    ctx.translate(x, row.y)
    ctx.fill(new Path2D($(`flag-${kind}`).getAttribute("d")))
    ctx.translate(-x, -row.y)
  }
}

function drawRuler(seen) { // step numbers and times
  let limit = LEFT - 1 // there is room for text to the right of this
  for (const column of seen) {
    const x = xOf(column)
    if (column.step === undefined || x < limit) continue
    const { time: start } = chart.columns.find(({ engine }) => engine === column.engine)
    const text = `${column.step} · ${span(1000 * (column.time - start))}`
    const end = x + 4 + ctx.measureText(text).width
    if (end > paper.width) break
    limit = end + 40
    paint(theme.quiet, x, RULER - 6, 1, 5)
    write(theme.ink, text, x + 4, 8)
  }
}

function drawPlace(bottom) { // mark the current place, and where an engine restarted
  const { columns } = chart
  for (const x of columns.filter(({ isRestart }) => isRestart).map(xOf)) {
    paint(theme.error, x - 1, RULER, 1.5, bottom - RULER)
    write(theme.error, "engine restarted", x + 6, bottom - 8)
  }
  const column = columns[Math.max(0, columnShown())]
  const x = endOf(column)
  if (x < LEFT) return
  paint(theme.later, x, RULER, endOf(columns.at(-1)) - x, paper.height)
  paint(theme.accent, x - 0.75, 15, 1.5, paper.height)
  paint(theme.accent, x - 5, 15, 10, 7) // below the text
}

// ---- Pointer, wheel and keys ----

function pan(left) {
  chart.left = clamp(left, 0, chart.end)
  chart.follows = false
  view.isNews = true
}

function hold(unit, x, scale) { // zoom so that this unit stays at x
  chart.scale = clamp(scale, 0.01, 40)
  pan(unit + (LEFT - x) / chart.scale)
}

function seekTo(x) { // returns the column
  const i = columnAt(x)
  if (chart.columns[i]) seek(chart.columns[i].place)
  return i
}

const rowAt = y => chart.shown[Math.floor((y - RULER) / chart.rowHeight)]

function startTimeline() {
  const timeline = $("timeline")
  const fingers = new Map() // fingers that are down: x, and the unit that stays under it
  let from // the column where a range begins
  let pressed // x where the pointer went down
  const select = (range, x, y) => {
    chart.range = range.sort((a, b) => a - b)
    tip(wordsOfRange(...range), x, y)
    view.isNews = true
  }
  const extend = move => { // move the current place, and extend the range to it
    const at = columnShown()
    const column = chart.columns[at + move]
    if (!column) return
    if (!chart.range[1]) from = at
    seek(column.place)
    followPlace()
    const { left, top } = timeline.getBoundingClientRect()
    select([from, at + move], left + xOf(column), top + RULER)
  }
  timeline.onpointerdown = ({ pointerId, offsetX: x, offsetY: y }) => {
    timeline.setPointerCapture(pointerId)
    fingers.set(pointerId, { x, unit: unitAt(x) })
    pressed = x
    from = y < RULER ? seekTo(x) : undefined
    chart.range = []
  }
  timeline.onpointermove = ({ pointerId, offsetX: x, offsetY: y, clientX, clientY }) => {
    const finger = fingers.get(pointerId)
    if (finger && from === undefined) {
      finger.x = x
      const [one, two = one] = fingers.values()
      return hold(one.unit, one.x, (two.x - one.x) / (two.unit - one.unit) || chart.scale)
    }
    const i = x > LEFT ? columnAt(x) : -1
    const stays = y < RULER && chart.range[1]
    light(i < 0 ? rowAt(y)?.r : undefined)
    select(finger ? [from, seekTo(x)] : stays ? chart.range : [i], clientX, clientY)
  }
  timeline.onlostpointercapture = ({ pointerId }) => fingers.delete(pointerId)
  timeline.onclick = ({ offsetX: x, offsetY: y }) => {
    if (Math.abs(x - pressed) > 3 || from >= 0) return
    if (x > LEFT) seekTo(x)
    else choose(rowAt(y)?.r)
  }
  timeline.onpointerleave = timeline.onblur = () => {
    select([])
    point()
  }
  timeline.onwheel = event => { // zoom around the pointer
    event.preventDefault()
    const { offsetX, deltaX, deltaY } = event
    hold(unitAt(offsetX), offsetX - deltaX, chart.scale * Math.exp(-deltaY / 500))
  }
  timeline.onkeydown = event => {
    const { key, shiftKey } = event
    const move = { ArrowUp: -1, ArrowDown: 1 }[key]
    const further = shiftKey && { ArrowLeft: -1, ArrowRight: 1 }[key]
    if (key === "Enter") choose(lit)
    if (!shiftKey) select([])
    if (!move && !further) return
    event.preventDefault()
    if (further) return extend(further)
    const at = chart.shown.findIndex(({ r }) => r === lit) + move
    light(chart.shown[clamp(at, 0, chart.shown.length - 1)]?.r)
  }
  $("widths").onchange = () => {
    setWidths()
    chart.scale = (9 * chart.columns.length) / chart.end || 1
    chart.follows = true
    state.touched = null
  }
}
