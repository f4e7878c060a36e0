// The page: which view the address asks for, the navigation, and signing out.

import { ApiError, signOut } from "./api.js";
import { el, replace } from "./dom.js";
import { ClusterView } from "./views/cluster.js";
import { JobView } from "./views/job.js";
import { JobsView } from "./views/jobs.js";
import { notice } from "./views/parts.js";

const main = document.getElementById("main");
const connection = document.getElementById("connection");
let view = null;

// #/jobs, #/jobs/<id>, #/cluster
function route() {
  const [room, id] = location.hash.replace(/^#\/?/, "").split("/").map(decode);
  if (room === "jobs" && id) return { section: "jobs", make: (context) => new JobView(context, id) };
  if (room === "cluster") return { section: "cluster", make: (context) => new ClusterView(context) };
  if (room === "jobs" || room === "") return { section: "jobs", make: (context) => new JobsView(context) };
  return { section: "", make: () => new UnknownView(room) };
}

function decode(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function show() {
  view?.destroy();
  const { section, make } = route();
  for (const link of document.querySelectorAll("nav a")) {
    if (link.dataset.section === section) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  setConnection(null);
  view = make({ setTitle, setConnection, onError });
  replace(main, view.element);
  scrollTo(0, 0);
}

// After a change of view the reading position is at its heading.
function showAndFocus() {
  show();
  main.focus({ preventScroll: true });
}

function setTitle(text) {
  document.title = `${text} · elastic-zero`;
}

// state: "live", "connecting", "lost", "ended" or null for none.
function setConnection(state, text = "") {
  connection.hidden = state === null;
  connection.dataset.state = state ?? "";
  if (connection.textContent !== text) connection.textContent = text;
}

// What no view can handle: without a session the page itself answers with the sign-in form.
function onError(error) {
  if (error instanceof ApiError && error.status === 401) location.reload();
}

class UnknownView {
  constructor(name) {
    setTitle("Not found");
    this.element = notice("error", "There is no such page", `Nothing is shown under “${name}”.`, [
      el("a", { href: "#/jobs" }, "All jobs"),
    ]);
  }

  destroy() {}
}

document.getElementById("sign-out").addEventListener("click", async () => {
  await signOut().catch(() => null);
  location.reload();
});
// The part after # names a view, so the link to the content cannot be followed as one.
document.getElementById("skip").addEventListener("click", (event) => {
  event.preventDefault();
  main.focus();
});
addEventListener("hashchange", showAndFocus);
show();
