// The search runs in a Worker, and browsers start none for a page that was opened from disk. There, an invisible frame
// does the same work. Over http nothing changes. (A frame has no importScripts; the search in English does not need it.)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      this.frame.src = "about:blank"
      const begin = () => {
        const inside = this.frame.contentWindow
        inside.postMessage = data => this.tell(data)
        inside.importScripts = async () => {}
        const script = inside.document.createElement("script")
        script.src = url
        script.onload = () => {
          const waiting = this.waiting
          this.waiting = null
          waiting.forEach(data => this.postMessage(data))
        }
        script.onerror = () => this.dispatchEvent(new ErrorEvent("error", { message: `${url} cannot be loaded` }))
        inside.document.head.appendChild(script)
      }
      document.body ? this.attach(begin) : addEventListener("DOMContentLoaded", () => this.attach(begin))
    }

    attach(begin) {
      document.body.appendChild(this.frame)
      begin()
    }

    tell(data) {
      const event = new MessageEvent("message", { data })
      this.dispatchEvent(event)
      if (this.onmessage) this.onmessage(event)
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
