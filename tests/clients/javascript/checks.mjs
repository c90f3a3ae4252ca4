// What shows how each method of E2B's JavaScript client goes here. Reads GATEWAY and TOKEN; prints one line of JSON for each check:
// the methods, and what was wrong, or nothing. Those of `git` and `Template` are left to the client for Python.
import assert from 'node:assert/strict'
import * as e2b from 'e2b'
import * as interpreter from '@e2b/code-interpreter'

const { Sandbox } = e2b
const options = { apiKey: process.env.TOKEN, apiUrl: process.env.GATEWAY, sandboxUrl: process.env.GATEWAY, requestTimeoutMs: 60000 }
const sandbox = await Sandbox.create({ ...options, timeoutMs: 3600000, envs: { GREETING: 'hello' }, metadata: { task: 'shared' } })
const { commands, files, pty } = sandbox
const background = { background: true }
const SIZE = { cols: 70, rows: 20 }
const text = (bytes) => Buffer.from(bytes).toString()
const says = async (command, more = {}) => (await commands.run(command, more)).stdout
const refused = (call, error, words) => assert.rejects(call, (found) => found instanceof error && words.test(found.message))

async function until(condition) {
  while (!(await condition())) await new Promise((resolve) => setTimeout(resolve, 20))
}

const checks = {
  // -- sandboxes
  'Sandbox.create': async () => {
    const own = await Sandbox.create('base', { ...options, envs: { A: 'x y' }, timeoutMs: 60000 })
    assert.equal((await own.commands.run('echo "$A"')).stdout, 'x y\n')
    assert(await own.kill())
    await refused(() => Sandbox.create({ ...options, lifecycle: { onTimeout: 'pause' } }), e2b.SandboxError, /autoPause/)
  },
  'Sandbox.connect': async () => {
    const again = await Sandbox.connect(sandbox.sandboxId, options)
    assert.equal((await again.commands.run('echo $GREETING')).stdout, 'hello\n')
  },
  'Sandbox.list': async () => {
    const found = await Sandbox.list({ ...options, query: { metadata: { task: 'shared' } } }).nextItems()
    assert.deepEqual(found.map((info) => info.sandboxId), [sandbox.sandboxId])
  },
  'Sandbox.getInfo': async () => {
    const info = await sandbox.getInfo()
    assert.deepEqual([info.sandboxId, info.state, info.cpuCount, info.metadata.task], [sandbox.sandboxId, 'running', 1, 'shared'])
  },
  'Sandbox.setTimeout': async () => {
    const own = await Sandbox.create(options)
    await own.setTimeout(1000)
    await until(async () => !(await own.isRunning()))
  },
  'Sandbox.kill, Sandbox.isRunning': async () => {
    const own = await Sandbox.create(options)
    assert(await own.isRunning() && await own.kill() && !(await own.isRunning()) && !(await own.kill()))
    await refused(() => own.commands.run('true'), e2b.SandboxNotFoundError, /./)
    await refused(() => own.getInfo(), e2b.SandboxNotFoundError, /not found/)
  },
  'Sandbox.getMetrics': async () => assert.deepEqual(await sandbox.getMetrics(), []),
  'Sandbox.updateNetwork': () => sandbox.updateNetwork({ allowOut: ['192.0.2.1'] }),
  'Sandbox.getHost': () => assert.equal(sandbox.getHost(8000), `8000-${sandbox.sandboxId}.e2b.app`),
  'Sandbox.downloadUrl, Sandbox.uploadUrl': async () => {
    await files.write('signed', 'text')
    for (const url of [await sandbox.downloadUrl('signed'), await sandbox.uploadUrl('signed')]) assert((await fetch(url)).status >= 400)
  },
  'Sandbox.getMcpUrl, Sandbox.getMcpToken': async () => assert.equal(await sandbox.getMcpToken().catch(() => undefined), undefined),
  'Sandbox.pause, Sandbox.betaPause': async () => {
    await refused(() => sandbox.pause(), e2b.SandboxError, /501: pause/)
    await refused(() => sandbox.betaPause(), e2b.SandboxError, /501: pause/)
  },
  'Sandbox.fork': () => refused(() => sandbox.fork(), e2b.SandboxError, /501: fork/),
  'Sandbox.createSnapshot': () => refused(() => sandbox.createSnapshot(), e2b.SandboxError, /501: snapshots/),
  'Sandbox.listSnapshots': () => refused(() => sandbox.listSnapshots().nextItems(), e2b.SandboxError, /404: GET .snapshots is not served/),
  '@e2b/code-interpreter: Sandbox.runCode': async () => {
    const own = await interpreter.Sandbox.create(options)
    await refused(() => own.runCode('print(1)'), interpreter.NotFoundError, /Not Found/)
    await own.kill()
  },

  // -- commands
  'commands.run': async () => {
    const done = await commands.run('echo "$GREETING $A é世"; echo err >&2', { envs: { A: 'a b' } })
    assert.deepEqual([done.exitCode, done.stdout, done.stderr], [0, 'hello a b é世\n', 'err\n'])
    assert.equal(await says('pwd'), '/home/user\n')
    assert.equal(await says('pwd', { cwd: '/tmp' }), '/tmp\n')
    await assert.rejects(commands.run('echo out; exit 3'), { name: 'CommandExitError', exitCode: 3, stdout: 'out\n' })
    await assert.rejects(commands.run('sleep 300', { timeoutMs: 500 }), e2b.TimeoutError)
    assert.equal((await says("head -c 5000000 /dev/zero | tr '\\0' x")).length, 5000000)
  },
  'commands.run (onStdout)': async () => {
    // The second half is printed once the first one has come, and one character is cut by that.
    const parts = []
    const onStdout = async (part) => parts.push(part) === 1 && files.write('go', '')
    const all = await says("printf 'caf\\303'; printf 'x' >&2; until [ -e go ]; do sleep 0.01; done; printf '\\251\\n'", { onStdout })
    assert.deepEqual([all, parts], ['café\n', ['caf', 'é\n']])
  },
  'commands.run (a server, reached by the next command)': async () => {
    const server = await commands.run('exec python3 -u -m http.server 8123', background)
    const ask = "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://localhost:8123/\").status)' 2>/dev/null || echo no"
    await until(async () => (await says(ask)) === '200\n')
    assert(await server.kill())
  },
  'commands.run, commands.connect, files.watchDir (errors of streams)': async () => {
    await refused(() => commands.run('true', { cwd: '/nowhere' }), e2b.InvalidArgumentError, /does not exist/)
    await refused(() => commands.run('a\0b'), e2b.InvalidArgumentError, /command/)
    await refused(() => commands.connect(999999), e2b.NotFoundError, /not found/)
    await refused(() => files.watchDir('.', () => {}), e2b.SandboxError, /unimplemented.* not served here/)
  },
  'commands.list, commands.kill': async () => {
    const handle = await commands.run('sleep 300', background)
    assert((await commands.list()).some((process) => process.pid === handle.pid))
    assert(await commands.kill(handle.pid))
    await assert.rejects(handle.wait(), e2b.CommandExitError)
    assert(!(await commands.kill(handle.pid)))
  },
  'commands.connect': async () => {
    const handle = await commands.run('echo first; read line; echo $line', { ...background, stdin: true })
    const joined = await commands.connect(handle.pid)
    await commands.sendStdin(handle.pid, 'second\n')
    assert.equal((await joined.wait()).stdout, 'first\nsecond\n')
  },
  'commands.sendStdin, commands.closeStdin': async () => {
    const handle = await commands.run('cat', { ...background, stdin: true })
    await commands.sendStdin(handle.pid, 'hé\n')
    await commands.closeStdin(handle.pid)
    assert.equal((await handle.wait()).stdout, 'hé\n')
  },
  'CommandHandle.wait, sendStdin, closeStdin': async () => {
    const handle = await commands.run('cat; exit 4', { ...background, stdin: true })
    await handle.sendStdin('a')
    await handle.closeStdin()
    await assert.rejects(handle.wait(), { exitCode: 4, stdout: 'a' })
  },
  'CommandHandle.kill, disconnect': async () => {
    const handle = await commands.run('sleep 300', background)
    await handle.disconnect()
    assert((await commands.list()).some((process) => process.pid === handle.pid))
    assert(await (await commands.connect(handle.pid)).kill())
  },

  // -- terminals
  'pty.create, pty.sendInput, pty.resize': async () => {
    let seen = ''
    const handle = await pty.create({ ...SIZE, onData: (data) => { seen += text(data) } })
    await pty.resize(handle.pid, { cols: 99, rows: 33 })
    await pty.sendInput(handle.pid, Buffer.from('stty size; tty; exit\n'))
    await handle.wait()
    assert.match(seen, /33 99\r\n\/dev\/pts\//)
  },
  'pty.connect, pty.kill': async () => {
    const handle = await pty.create({ ...SIZE, onData: () => {} })
    const joined = await pty.connect(handle.pid, { onData: () => {} })
    assert(await pty.kill(handle.pid))
    await assert.rejects(joined.wait(), e2b.CommandExitError)
  },

  // -- files
  'files.write, files.read': async () => {
    for (const path of ['/tmp/a b/é.txt', '/home/user/a b/é.txt', 'c/d']) {
      await files.write(path, 'hello')
      assert.equal(await says(`cat '${path}'`), 'hello')
      assert.equal(await files.read(path), 'hello')
    }
    for (const data of [new Uint8Array([0, 255, 1]).buffer, new Blob([new Uint8Array([0, 255, 1])])]) {
      await files.write('bytes', data)
      assert.deepEqual([...(await files.read('bytes', { format: 'bytes' }))], [0, 255, 1])
    }
    let streamed = ''
    for await (const part of await files.read('c/d', { format: 'stream' })) streamed += text(part)
    assert.equal(streamed, 'hello')
    await refused(() => files.read('nowhere'), e2b.FileNotFoundError, /nowhere/)
  },
  'files.writeFiles': async () => {
    const written = await files.writeFiles([{ path: 'm/1', data: '1' }, { path: 'm/2', data: '2' }])
    assert.deepEqual(written.map((one) => one.name), ['1', '2'])
    assert.equal(await says('cat m/1 m/2'), '12')
  },
  'files.list, files.getInfo, files.exists': async () => {
    await says("mkdir -p l/deep; printf 1234 >l/file; chmod 640 l/file")
    assert.deepEqual((await files.list('l')).map((entry) => [entry.name, entry.type]), [['deep', 'dir'], ['file', 'file']])
    const info = await files.getInfo('l/file')
    assert.deepEqual([info.path, info.size, info.mode, info.permissions], ['/home/user/l/file', 4, 0o640, '-rw-r-----'])
    assert(await files.exists('l/file') && !(await files.exists('nowhere')))
    await refused(() => files.list('nowhere'), e2b.FileNotFoundError, /does not exist/)
  },
  'files.rename, files.remove, files.makeDir': async () => {
    assert(await files.makeDir('r/deep') && !(await files.makeDir('r/deep')))
    assert.equal((await files.rename('r/deep', 'r/moved')).path, '/home/user/r/moved')
    await files.remove('r')
    assert(!(await files.exists('r')))
  },
  'files.watchDir': () => refused(() => files.watchDir('.', () => {}), e2b.SandboxError, /not served/),
}

for (const [methods, check] of Object.entries(checks)) {
  let wrong = ''
  try { await check() } catch (error) { wrong = `${error?.stack ?? error}` }
  console.log(JSON.stringify({ methods, wrong }))
}
await sandbox.kill()
