"use strict"
// The state that the lines so far describe, the tape (all lines and the current place among them),
// the player, and the connection to the server. Nothing is drawn here.

const $ = id => document.getElementById(id)
const clamp = (x, low, high) => Math.max(low, Math.min(x, high))
const count = (n, noun) => `${n} ${noun}${n === 1 ? "" : "s"}`

function make(tag, properties, ...children) {
  // text from the server is inserted as text, never as HTML
  const element = Object.assign(document.createElement(tag), properties)
  element.append(...children)
  return element
}

// ---- The state: block tables, the owners of each block, committed blocks, and the rest ----

const NUM_HUES = 12
let state
let tape

const hasNumber = line => line.event === "step" && line.step !== undefined
const isSnapshot = line => line.event === "snapshot"

function load(line) { // replace the whole state by a snapshot
  if (line.num_blocks > 4e6) throw new Error("its pool is too large to draw")
  if (line.engine !== state.engine) {
    state.last = []
    tape.shown = 32
    grid = null
  }
  line.last ??= state.last // the last owners of cached blocks, in case the player returns here
  Object.assign(state, line, {
    step: Math.max(0, line.step - 1), // a snapshot has the number of the next step
    totals: { ...line.totals },
    requests: new Map(),
    committed: new Set(line.committed),
    idle: new Set(line.idle), // in order of eviction
    last: line.last.slice(), // each block's last owner: [request, logical block]
    // each block's holders: [request, logical block]; the last entry is no block, see isGivenBack
    owners: Array.from({ length: line.num_blocks + 1 }, () => []),
    touched: null, // blocks that have changed since they were last drawn; null means all
  })
  state.idle.forEach(show)
  line.requests.forEach(addRequest)
}

function addRequest(told) {
  const none = { filled: 0, generated: 0, hits: 0, preemptions: 0, target: told.prompt }
  const q = { ...none, ...told, table: [], hue: tape.hues.get(idOf(told.r)) }
  state.requests.set(q.r, q)
  setTable(q, 0, told.table)
}

// When it gets its first block, a request gets the next hue that no other request has. The hues are
// used in rotation, so one that has become free is not reused immediately.
function giveHue(q) {
  const used = new Set([...state.requests.values()].map(({ hue }) => hue))
  let turn = tape.hues.size
  while (used.has(turn % NUM_HUES) && turn < tape.hues.size + NUM_HUES) turn += 1
  q.hue = turn % NUM_HUES
  tape.hues.set(idOf(q.r), q.hue)
}

function setTable(q, from = 0, blocks = []) {
  const left = q.table.splice(from, Infinity, ...blocks)
  for (const block of left) {
    state.owners[block] = state.owners[block].filter(([holder]) => holder !== q)
  }
  if (blocks.length && q.hue === undefined) giveHue(q)
  blocks.forEach((block, i) => {
    if (isGivenBack(q, from + i)) return
    state.last[block] = [q, from + i]
    state.owners[block].push(state.last[block])
    state.idle.delete(block)
    show(block)
  })
  touch([...left, ...blocks])
}

// True if this block has moved out of the window and was freed. The first block takes its place in
// the table (in older records num_blocks does).
const isGivenBack = ({ table }, i) =>
  table[i] === state.num_blocks || (i > 0 && table[i] === table[0])

// The pool is shown up to the highest block that has ever been held or cached, or a little further.
function show(block) {
  while (tape.shown <= Math.min(block, state.num_blocks)) {
    tape.shown *= 2
    grid = null
  }
}

function touch(blocks) {
  for (const block of blocks) state.touched?.add(block)
}

function fill(q, end) {
  touch(q.table.slice(Math.floor(q.filled / state.block_size)))
  q.filled = end
  q.status = end < q.target ? "prefilling" : "active"
  if (end >= q.target) q.generated = Math.max(q.generated, end - q.prompt + 1)
}

// Returns the events worth showing: [{kind, r, text, blocks}].
function applyStep(line) {
  const events = []
  const { requests, totals, idle, block_size: size } = state
  const { preempted = [], evicted = [], committed = [], idle: idled = [], lack } = line
  const tell = (kind, r, text, blocks) => events.push({ kind, r, text, blocks })
  const each = (name, change) => {
    for (const [r, ...rest] of line[name] ?? []) change(requests.get(r), ...rest)
  }
  line.new?.forEach(addRequest)
  if (hasNumber(line)) {
    state.decodes = line.decodes ?? state.decodes
    state.step = line.step
    state.underWay = line.resolved === line.step ? null : line // its K, V are not computed yet
    for (const q of state.decodes.map(r => requests.get(r))) fill(q, q.filled + 1)
  }
  for (const r of preempted) {
    const q = requests.get(r)
    tell("preempted", r, `gave back ${count(q.table.length, "block")}`, q.table.slice())
    setTable(q)
    q.status = "waiting"
    q.filled = 0
    q.preemptions += 1
    totals.preemptions += 1
  }
  each("copies", ({ r }, block, source) =>
    tell("copied", r, `shared block ${source} to ${block}`, [source, block]))
  if (evicted.length) tell("evicted", "", count(evicted.length, "block"), evicted)
  for (const block of evicted) {
    state.committed.delete(block)
    idle.delete(block)
  }
  if (lack) tell("waits", lack[0], `needs ${count(lack[1], "block")}, ${lack[2]} available`)
  each("tables", setTable)
  each("admitted", (q, hits, target) => {
    q.target = target
    fill(q, hits)
    totals["queried tokens"] += target
    totals["hit tokens"] += hits
    if (!q.preemptions) q.hits = hits
    const found = `${count(hits / size, "block")} found in the cache`
    if (hits || q.preemptions) tell(
      q.preemptions ? "resumed" : "hit", q.r, found, q.table.slice(0, hits / size))
  })
  each("chunks", (q, first, n) => fill(q, first + n))
  each("drafts", (q, n) => fill(q, q.filled + n))
  for (const block of committed) state.committed.add(block)
  each("ended", (q, reason, n) => {
    tell("ended", q.r, `${reason} after ${count(n, "token")}`)
    setTable(q)
    requests.delete(q.r)
  })
  for (const block of idled) { // moves to the end, even if it was already idle before this line
    idle.delete(block)
    idle.add(block)
  }
  touch([...evicted, ...committed, ...idled])
  return events
}

// ---- The tape: all lines, and the current place. Going back starts at an earlier snapshot. ----

const MOST = 50000 // how many lines are kept

function begin(lines, isLive) {
  state = { requests: new Map(), num_blocks: 0, decodes: [], owners: [], idle: new Set(),
    totals: { preemptions: 0 } }
  tape = { lines, at: -1, noted: -1, title: {}, hues: new Map(), seen: new Map() }
  Object.assign(player, {
    isPaused: false, isLive, until: null, from: Infinity, speed: isLive ? Infinity : 10,
  })
  beginChart()
  leaveStage()
  forgetDrawing()
}

const present = () => ({ state, tape, chart, player: { ...player } })

function restore(past) {
  ;({ state, tape, chart } = past)
  Object.assign(player, past.player)
  setWidths()
}

const newest = () => tape.lines.length - 1

function moveTo(place) {
  const { lines, at } = tape
  place = clamp(place, 0, newest())
  if (place < at) tape.at = lines.slice(0, place + 1).findLastIndex(isSnapshot) - 1
  let events = []
  while (tape.at < place) events = moveOn()
  return events
}

function moveOn() {
  tape.at += 1
  const line = tape.lines[tape.at]
  if (isSnapshot(line)) load(line)
  state.time = line.time ?? state.time
  const events = line.event === "step" ? applyStep(line) : []
  if (tape.at > tape.noted) {
    note(line, events)
    tape.noted = tape.at
  }
  return events
}

const stepPlace = step => tape.lines.findLastIndex(line => hasNumber(line) && line.step === step)
const stepsAfter = place => tape.lines.slice(place + 1).filter(hasNumber).length

// ---- The player ----

// A demo sets player.until. Then the tape plays at 10 steps a second, and stops after the line for
// which until(line, its events) is true. Seeking cancels the demo.
// Since the place player.from, only this page's requests have run; Infinity means that others have
// also run. At player.speed Infinity, the user's own prompts play slowly enough to be watched, and
// everything else plays as it happens.
const player = { owed: 0, before: 0 } // begin adds further fields

const isSlow = () => player.until || (player.speed === Infinity && player.from < Infinity)

function pace() { // steps per second: an answer of 64 tokens takes 2 seconds, a longer one 3
  if (player.until) return 10
  return isSlow() ? Math.max(30, stepsAfter(player.from) / 3) : player.speed
}

function frame(now) {
  requestAnimationFrame(frame) // first, so that an error below does not stop the frames
  const seconds = Math.min(0.1, (now - player.before) / 1000)
  const behind = newest() - tape.at
  const speed = pace()
  player.before = now
  // lines arrive in batches; play at most a sixth of the backlog per frame, for smooth motion
  player.owed = Math.min((player.owed % 1) + (speed * seconds || 0), Math.ceil(behind / 6))
  for (let i = 1; i <= player.owed && !player.isPaused; i++) playOn()
  if (!player.isLive && !behind) player.isPaused = true
  // because lines arrive in batches, being up to half a second late still counts as live
  player.isBehind = behind > (player.isBehind ? 0 : Math.min(speed, 100) / 2)
  if (!behind && !state.requests.size) player.from = tape.at
  draw(now)
}

function playOn() {
  const events = moveOn()
  showEffects(events)
  if (!player.until?.(tape.lines[tape.at], events)) return
  player.until = null
  player.isPaused = true
  view.told = -Infinity // show the pause in this frame, so that the demo's arrow stays visible
}

function seek(place, isPaused = true) {
  if (!tape.lines.length) return
  leaveStage()
  showEffects(moveTo(place))
  if (!isPaused) player.from = tape.at
  player.isPaused = isPaused
  player.until = null
  if (!isPaused && tape.lines.length > MOST) listenInSight()
  state.touched = null
  chart.follows = true
}

function seekStep(direction) {
  let place = tape.at + direction
  while (tape.lines[place] && tape.lines[place].event !== "step") place += direction
  seek(place)
}

function togglePause() { // at the end of a record, start over
  const isOver = !player.isLive && tape.at === newest()
  seek(isOver ? 0 : tape.at, !player.isPaused)
}

function goLive() {
  player.speed = Infinity
  seek(Infinity, false)
  player.from = Infinity
}

const INSIDE = "the record in this page"

async function replay(text, name) {
  let before
  try { // text is the content of a file, or a promise of it
    const lines = readLines(await text)
    const title = lines[0]?.event === "title" ? lines.shift() : {}
    if (lines[0]?.version !== 2) throw new Error("it does not begin with a version 2 snapshot")
    leaveTour()
    before = present()
    begin(lines, false)
    tape.name = name
    tape.title = title
    moveTo(5000) // what the timeline shows at first; the rest is added as it is played
    seek(telling(lines))
    listening.abort()
    setText("notice", "")
    $("tab-pool").checked = true
  } catch ({ message }) {
    if (before) restore(before)
    setText("notice", `${name} is not a valid serve.py record: ${message}`)
  }
}

// Skips what follows the last line break: it is empty, or was cut off when the server was killed.
const readLines = text => text.split("\n").slice(0, -1).map(line => JSON.parse(line))

function telling(lines) { // the place that shows most about paging
  const places = [
    line => line.preempted,
    line => line.copies,
    line => line.admitted?.some(([, hits]) => hits),
  ].map(test => lines.findIndex(test))
  return places.find(place => place > 0) ?? lines.length >> 1
}

function followLink(link = location.hash) { // #step=46 leads to step 46, if the tape has it
  const place = stepPlace(Number(link.split("#step=")[1]))
  if (place >= 0) seek(place)
  return place >= 0
}

// ---- The server ----

// `is` is Loading, Key wanted, Live, Restarting, Refused or Offline
const server = { hasChat: true, is: "Loading" }
let key = ""
let listening = new AbortController()

function askForKey() {
  setText("notice", key && "This API key is not accepted")
  server.is = "Key wanted"
  $("key").hidden = false
}

function takeKey() {
  key = $("text").value.trim()
  $("key").hidden = true
  $("key").reset()
  listenInSight()
}

// The path is relative, because a proxy may add a prefix. Throws the server's error {message,
// code, ..}, or an error without a code if the server does not respond.
async function call(path, { body, name, signal } = {}) {
  const headers = { "Content-Type": "application/json" }
  if (key) headers.Authorization = `Bearer ${key}`
  if (name) headers["X-Request-Id"] = name
  const response = await fetch(path, {
    method: body ? "POST" : "GET", body: JSON.stringify(body), headers, signal,
  })
  if (response.ok) return response
  const { error } = await response.json()
  throw { ...error }
}

const json = async (path, body) => (await call(path, { body })).json()

async function* eventsOf(response) { // the data of server-sent events, as strings
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader()
  for (let rest = "", part; !(part = await reader.read()).done;) {
    const events = (rest + part.value).split("\n\n")
    rest = events.pop()
    for (const event of events) if (event.startsWith("data: ")) yield event.slice(6)
  }
}

async function listen() {
  listening = new AbortController()
  const { signal } = listening
  while (!signal.aborted) {
    const error = (await hear(signal).catch(thrown => thrown)) ?? {}
    if (signal.aborted) return
    if (error.code === "invalid_api_key") return askForKey()
    server.is = { loading: "Loading", restarting: "Restarting", undefined: "Offline" }[error.code]
      ?? "Refused"
    setText("notice", wordsOf(error))
    await new Promise(resolve => setTimeout(resolve, 2000))
  }
}

// A browser opens at most six connections to a host, for all tabs together, so a hidden tab closes
// its own.
function listenInSight() {
  listening.abort()
  if (player.isLive && !document.hidden) listen()
}

async function hear(signal) { // returns when the server ends the stream
  const { data: [{ id, chat = true }] } = await json("v1/models")
  const response = await call("events", { signal })
  setText("notice", "")
  Object.assign(server, { model: id, hasChat: chat, is: "Live" })
  tellForm()
  let link = tape.at < 0 ? location.hash : "" // only once: a reconnect keeps the current place
  for await (const data of eventsOf(response)) {
    const lines = JSON.parse(data)
    takeIn(lines)
    if (followLink(link) || lines.length < 100) link = "" // a short part ends the history
  }
}

// The stream begins with a history, parts of which may already be on the tape.
function takeIn(lines) {
  const { seen } = tape // engine -> time of its last line, or Infinity once it has ended
  const news = lines.filter(({ engine = seen.last, time = Infinity }) => {
    const isNew = time > (seen.get(engine) ?? -1)
    if (isNew) seen.set(engine, time)
    seen.last = engine
    return isNew
  })
  tape.lines.push(...news)
  if (news.length) server.is = news.at(-1).event === "engine" ? "Restarting" : "Live"
  // the requests of a call are numbered in the order of its answers
  for (const { name, r } of news.flatMap(line => line.new ?? []).sort((a, b) => a.r - b.r)) {
    const answer = calls.get(name)?.find(one => one.r === undefined)
    if (answer) answer.r = r
    else player.from = Infinity
  }
  if (tape.lines.length > MOST) {
    if (player.isPaused) listening.abort() // until it plays again
    else {
      begin(tape.lines.slice(tape.lines.findLastIndex(isSnapshot)), true)
      tape.seen = seen
    }
  }
  if (tape.at < 0) moveTo(Infinity) // skip the history
}
