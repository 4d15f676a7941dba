// ---- The timeline: a row is a request, a column a step ----

const LEFT = 60 // pixels, for the labels of rows
const RULER = 22
const MOST_ROWS = 60 // beyond them: how many run and wait, instead of each
const FLAGS = { hit: "good", resumed: "accent", copied: "accent", preempted: "error" }
let chart
let paper // {ctx, width, height} of the timeline

function beginChart() {
  chart = {
    columns: [],
    rows: new Map(),
    restarts: [], // before which columns
    shown: [], // rows
    mode: $("widths").value,
    end: 0, // units of all columns together
    left: 0, // the unit at the left
    scale: 1, // pixels a unit
    follows: true,
  }
}

function rowOf(r) { // made when it is first asked for
  const { rows, columns } = chart
  const id = idOf(r)
  if (!rows.has(id)) rows.set(id, { id, r, first: columns.length, flags: [] })
  return rows.get(id)
}

function note(line, events) { // what the timeline draws of a line, when it is applied first
  const { columns, restarts } = chart
  if (line.engine && line.engine !== chart.engine) {
    if (chart.engine) restarts.push(columns.length)
    Object.assign(chart, { engine: line.engine, time: NaN })
  }
  for (const { r } of [...(line.new ?? []), ...state.requests.values()]) {
    rowOf(r).last = columns.length
  }
  if (hasNumber(line) || line.event === "idle") {
    columns.push(newColumn(line))
    addWidth(columns.at(-1))
  }
  for (const { kind, r, text } of events) {
    columns.at(-1)?.told.push(`${r && `request ${r} `}${kind}: ${text}`)
    if (FLAGS[kind]) rowOf(r).flags.push({ column: Math.max(0, columns.length - 1), kind })
  }
}

function newColumn({ event, step, time, chunks: told = [], sampled = 0 }) {
  const { engine, token_budget, decodes } = state
  const isStep = event === "step"
  const scale = Math.min(3, 160 / token_budget) // units a token
  let prompts = 0 // chunks of a step stand side by side, as on its flat token axis
  const chunks = told.map(([r, , n]) => {
    const from = 5 + prompts * scale
    prompts += n
    return { row: rowOf(r), n, from, w: Math.max(3, n * scale) }
  })
  const ms = isStep ? (time - chart.time) * 1000 : NaN
  chart.time = isStep ? time : NaN // after a pause nobody knows when a step began
  const w = {
    tokens: isStep ? 6 + (prompts && 5 + prompts * scale) : 12,
    time: Math.max(0.01, ms || (chart.columns.at(-1)?.w.time ?? 1)),
  }
  const rows = { chunks, decodes: isStep ? decodes.map(rowOf) : [] }
  rows.waiting = waiting().map(({ r }) => rowOf(r))
  return { place: tape.at, engine, step, time, ms, sampled, prompts, w, ...rows, told: [] }
}

function addWidth(column) {
  column.start = chart.end
  chart.end += column.w[chart.mode]
}

const widthOf = ({ w }) => w[chart.mode] * chart.scale
const xOf = ({ start }) => LEFT + (start - chart.left) * chart.scale
const endOf = column => xOf(column) + widthOf(column)
const unitAt = x => chart.left + (x - LEFT) / chart.scale
const columnAt = x => chart.columns.findLastIndex(({ start }) => start <= unitAt(x))
const columnOf = place => chart.columns.findLastIndex(one => one.place <= place)

// Tokens a second, in the last one before the place that is shown; while a step takes longer, since
// the last that brought tokens has begun.
function rate(now) {
  const isNow = player.isLive && tape.at === tape.lines.length - 1
  const time = state.time + (isNow ? (now - view.since) / 1000 : 0)
  const past = chart.columns.filter(one => one.place <= tape.at && one.engine === state.engine)
  const since = state.requests.size ? past.findLast(({ sampled }) => sampled)?.time : Infinity
  const recent = past.filter(one => one.time > time - 1 || one.time >= since)
  if (!recent.length) return 0
  const first = recent[0].time - (recent[0].ms || 0) / 1000
  const sum = recent.reduce((total, { sampled }) => total + sampled, 0)
  return Math.round(sum / Math.max(0.02, time - first))
}

function wordsOfColumn(i) {
  if (i < 0) return []
  const { step, chunks, decodes, prompts, ms, told } = chart.columns[i]
  if (step === undefined) return ["idle: nothing to do"]
  const sizes = chunks.length > 3 ? prompts : chunks.map(({ n }) => n).join(", ")
  const parts = [`step ${step}: ${count(decodes.length, "decode")}`]
  if (prompts) parts.push(`${count(chunks.length, "chunk")} of ${sizes}`)
  if (ms) parts.push(`${ms.toFixed(1)} ms`)
  return [parts.join(", "), ...told]
}

// ---- Drawing ----

function followPlace() { // the place that is shown stays in sight, unless somebody has dragged
  const column = chart.columns[columnOf(tape.at)]
  if (!chart.follows || !column) return
  const wide = (paper.width - LEFT - 30) / chart.scale
  const { start } = column
  if (start < chart.left) chart.left = start - wide / 8
  chart.left = Math.max(0, chart.left, start + column.w[chart.mode] - wide)
}

function drawTimeline() {
  const { ctx, width, height } = paper
  const { columns, rows } = chart
  ctx.clearRect(0, 0, width, height)
  if (!columns.length) return
  const first = Math.max(0, columnAt(LEFT))
  const last = columnAt(width)
  const seen = columns.slice(first, last + 1)
  const bottom = height - 8 // of the rows
  const all = [...rows.values()].filter(row => row.first <= last && row.last >= first)
  const isDense = all.length > MOST_ROWS
  chart.shown = isDense ? all.filter(({ r }) => isLit(r)) : all
  chart.rowHeight = isDense ? 20 : Math.min(26, (bottom - RULER) / all.length)
  chart.shown.forEach((row, i) => {
    row.y = RULER + i * chart.rowHeight
    row.alpha = isLit(row.r) || !litRequests().length ? 1 : 0.22
  })
  for (const column of seen) {
    if (isDense) drawCounts(column, bottom, (bottom - RULER - 24) / all.length)
    else drawColumn(column)
  }
  chart.shown.forEach(drawFlags)
  ctx.globalAlpha = 1
  ctx.clearRect(0, 0, LEFT - 4, height)
  if (chart.rowHeight > 8) chart.shown.forEach(drawLabel)
  drawRuler(seen)
  drawPlace(bottom)
}

function drawLabel({ id, r, y }) {
  const high = chart.rowHeight
  paint(paper.ctx, shadesOf(id).strong, 10, y + high / 2, 4, high / 3)
  write(paper.ctx, theme.ink, r, 20, y + (2 * high) / 3)
}

function drawCounts(column, bottom, high) { // instead of rows
  const { decodes, chunks, waiting } = column
  const colours = [theme.held, theme.strong, theme.free]
  const counts = [decodes, chunks, waiting]
  counts.forEach(({ length }, i) => {
    bottom -= length * high
    paint(paper.ctx, colours[i], xOf(column), bottom, widthOf(column), length * high)
  })
}

function drawColumn(column) {
  const { ctx } = paper
  const x = xOf(column)
  const wide = widthOf(column)
  const unit = wide / column.w.tokens
  const high = Math.min(12, 0.6 * chart.rowHeight) // what is above is for flags
  const put = ({ id, y, alpha }, from, w, colour = shadesOf(id).strong) => {
    ctx.globalAlpha = alpha
    paint(ctx, colour, x + from * unit, y + chart.rowHeight - high - 2, w, high)
  }
  for (const row of column.decodes) put(row, 0, 4 * unit)
  for (const { row, from, w } of column.chunks) put(row, from, w * unit)
  for (const row of column.waiting) { // hollow
    put(row, 0, wide + 0.5, theme.quiet)
    ctx.clearRect(x, row.y + chart.rowHeight - high - 1, wide + 0.5, high - 2)
  }
}

function drawFlags(row) { // above the ticks; what they stand for is said on hovering
  const { ctx } = paper
  for (const { column, kind } of row.flags) {
    const x = xOf(chart.columns[column])
    ctx.globalAlpha = row.alpha
    paint(ctx, theme[FLAGS[kind]], x, row.y, 1, chart.rowHeight - 2)
    ctx.fillRect(x, row.y, 7, 5)
  }
}

function drawRuler(seen) { // step numbers and ms
  const { ctx } = paper
  let limit = LEFT - 1 // to the right of it is room for words
  for (const column of seen) {
    const x = xOf(column)
    if (column.step === undefined || x < limit) continue
    const { time: start } = chart.columns.find(({ engine }) => engine === column.engine)
    const ms = `${english(Math.round(1000 * (column.time - start)))} ms`
    const middle = x + 12 + ctx.measureText(column.step).width
    limit = Math.max(x + 110, middle + ctx.measureText(ms).width + 8)
    paint(ctx, theme.quiet, x, RULER - 6, 1, 5)
    write(ctx, theme.ink, column.step, x + 4, 11)
    write(ctx, theme.quiet, ms, middle, 11)
  }
}

function drawPlace(bottom) { // that is shown, and where engines restarted
  const { ctx, height } = paper
  const { columns, restarts } = chart
  for (const x of restarts.filter(i => columns[i]).map(i => xOf(columns[i]))) {
    paint(ctx, theme.error, x - 1, RULER, 1.5, bottom - RULER)
    write(ctx, theme.error, "engine restarted", x + 6, bottom - 8)
  }
  const column = columns[Math.max(0, columnOf(tape.at))]
  const x = endOf(column)
  if (x < LEFT) return
  ctx.globalAlpha = 0.6
  paint(ctx, theme.paper, x, RULER, endOf(columns.at(-1)) - x, height) // what comes later
  ctx.globalAlpha = 1
  paint(ctx, theme.accent, x - 0.75, 3, 1.5, height)
  paint(ctx, theme.accent, x - 5, 3, 10, 10)
}

// ---- Pointer, wheel and keys ----

function pan(left) {
  chart.left = clamp(left, 0, chart.end)
  chart.follows = false
  view.isNews = true
}

function fitAll() {
  chart.scale = (paper.width - LEFT - 30) / chart.end
  pan(0)
}

function seekTo(x) {
  const column = chart.columns[Math.max(0, columnAt(x))]
  if (column) seek(column.place)
}

const rowAt = y => chart.shown[Math.floor((y - RULER) / chart.rowHeight)]

function startTimeline() {
  const timeline = $("timeline")
  let isRuler
  let dragged // pixels
  timeline.onpointerdown = ({ pointerId, offsetX: x, offsetY: y }) => {
    timeline.setPointerCapture(pointerId)
    isRuler = y < RULER
    dragged = 0
    if (isRuler) seekTo(x)
  }
  timeline.onpointermove = ({ buttons, offsetX: x, offsetY: y, movementX, clientX, clientY }) => {
    if (!buttons) {
      light(rowAt(y)?.r)
      tip(x > LEFT ? wordsOfColumn(columnAt(x)) : [], clientX, clientY)
    } else if (isRuler) seekTo(x)
    else {
      dragged += Math.abs(movementX)
      pan(chart.left - movementX / chart.scale)
    }
  }
  timeline.onclick = ({ offsetX: x, offsetY: y }) => {
    if (dragged > 3 || isRuler) return
    if (x > LEFT) seekTo(x)
    else choose(rowAt(y)?.r)
  }
  timeline.onpointerleave = () => point()
  timeline.onwheel = event => { // what is under the pointer stays there
    event.preventDefault()
    const { offsetX, deltaX, deltaY } = event
    const unit = unitAt(offsetX)
    chart.scale = clamp(chart.scale * Math.exp(-deltaY / 500), 0.01, 40)
    pan(unit + (LEFT - offsetX + deltaX) / chart.scale)
  }
  timeline.onkeydown = event => {
    const move = { ArrowUp: -1, ArrowDown: 1 }[event.key]
    if (event.key === "Enter") choose(lit)
    if (!move) return
    event.preventDefault()
    const at = chart.shown.findIndex(({ r }) => r === lit) + move
    light(chart.shown[clamp(at, 0, chart.shown.length - 1)]?.r)
  }
  $("widths").onchange = () => {
    chart.mode = $("widths").value
    chart.end = 0
    chart.columns.forEach(addWidth)
    chart.scale = chart.mode === "tokens" ? 1 : (9 * chart.columns.length) / chart.end
    chart.follows = true
    state.touched = null
  }
}
