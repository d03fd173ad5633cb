// The copy button of a session copies what was typed: neither prompts nor output.
document.addEventListener("click", event => {
  const button = event.target.closest("[data-clipboard-target]")
  const code = button && document.querySelector(button.dataset.clipboardTarget)
  if (!code?.querySelector(".gp")) return
  const typed = code.cloneNode(true)
  typed.querySelectorAll(".gp, .go").forEach(part => part.remove())
  button.dataset.clipboardText = typed.textContent.replace(/\n{2,}/g, "\n").trim() + "\n"
}, true)
