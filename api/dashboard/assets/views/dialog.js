// One modal dialog that asks before something is done, and stays open with the reason where it is refused.

import { el, replace } from "../dom.js";
import { notice } from "./parts.js";

let serial = 0;

// Shows the question; `run` is awaited after the confirmation, and what it throws is shown.
export function confirm({ title, text, confirm: label, dismiss = "Back", danger = false, fields = null, run }) {
  const id = `dialog-${(serial += 1)}`;
  const problem = el("div", { class: "dialog-problem" });
  const accept = el("button", { type: "submit", class: danger ? "danger solid" : "primary" }, label);
  const back = el("button", { type: "button", onclick: () => dialog.close() }, dismiss);
  const form = el(
    "form",
    { method: "dialog", onsubmit: submitted },
    el("h2", { id: `${id}-title` }, title),
    el("p", { id: `${id}-text` }, text),
    fields,
    problem,
    el("div", { class: "dialog-buttons" }, back, accept),
  );
  const dialog = el(
    "dialog",
    { "aria-labelledby": `${id}-title`, "aria-describedby": `${id}-text`, onclose: () => dialog.remove() },
    form,
  );

  async function submitted(event) {
    event.preventDefault();
    accept.disabled = true;
    form.setAttribute("aria-busy", "true");
    replace(problem);
    try {
      await run();
      dialog.close();
    } catch (error) {
      replace(problem, notice("error", "The service refused", error.message));
    } finally {
      accept.disabled = false;
      form.removeAttribute("aria-busy");
    }
  }

  document.body.append(dialog);
  dialog.showModal();
}
