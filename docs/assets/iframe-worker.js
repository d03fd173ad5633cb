// A browser starts no worker for a page that was opened as a file. Search then runs in a hidden
// frame: a script tag loads what a worker would, and messages go by the frame's window.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.onmessage = null
      this.listeners = []
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      frame.srcdoc =
        "<script>" +
        "importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise(done => {" +
        "const script = document.createElement('script'); script.src = url; script.onload = done;" +
        "document.head.append(script) })), Promise.resolve());" +
        "postMessage = data => parent.dispatchEvent(new MessageEvent('frame-worker', {data}));" +
        "</" + "script><script src=\"" + url + "\"></" + "script>"
      window.addEventListener("frame-worker", ({data}) => {
        const event = new MessageEvent("message", {data})
        if (this.onmessage) this.onmessage(event)
        this.listeners.forEach(listener => listener(event))
      })
      frame.onload = () => {
        this.frame = frame
        this.waiting.forEach(data => this.postMessage(data))
      }
      document.documentElement.append(frame)
    }
    postMessage(data) {
      if (!this.frame) return void this.waiting.push(data)
      this.frame.contentWindow.dispatchEvent(new MessageEvent("message", {data}))
    }
    addEventListener(kind, listener) {
      if (kind === "message") this.listeners.push(listener)
    }
    removeEventListener(kind, listener) {
      this.listeners = this.listeners.filter(each => each !== listener)
    }
    terminate() {}
  }
}
