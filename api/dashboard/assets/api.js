// The REST routes the dashboard uses. Knows paths, JSON and problem+json; nothing of the page.

// An answer other than 2xx, or none at all (status 0). `message` is the problem's `detail`.
export class ApiError extends Error {
  constructor(status, code, detail) {
    super(detail);
    this.name = "ApiError";
    this.status = status;
    this.code = code;
  }
}

const TIMEOUT_MS = 20_000;
const PAGE = 1000;

async function call(method, path, { body, headers = {}, signal } = {}) {
  const timeout = AbortSignal.timeout(TIMEOUT_MS);
  const request = {
    method,
    headers: { Accept: "application/json", ...headers },
    signal: signal ? AbortSignal.any([signal, timeout]) : timeout,
    credentials: "same-origin",
  };
  if (body !== undefined) {
    request.body = JSON.stringify(body);
    request.headers["Content-Type"] = "application/json";
  }
  let response;
  try {
    response = await fetch(path, request);
  } catch (error) {
    if (signal?.aborted) throw error;
    const why = error.name === "TimeoutError" ? `no answer within ${TIMEOUT_MS / 1000} s` : "it cannot be reached";
    throw new ApiError(0, "unreachable", `The service did not answer: ${why}.`);
  }
  if (response.status === 204) return null;
  const answer = await response.json().catch(() => null);
  if (response.ok) return answer;
  throw new ApiError(
    response.status,
    answer?.code ?? `http_${response.status}`,
    answer?.detail ?? `The service answered ${response.status} ${response.statusText}.`,
  );
}

const query = (values) => {
  const given = Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return given.length ? `?${new URLSearchParams(given)}` : "";
};
const jobPath = (id, rest = "") => `/v1/jobs/${encodeURIComponent(id)}${rest}`;

export const listJobs = ({ cursor, limit, state, signal }) =>
  call("GET", `/v1/jobs${query({ cursor, limit, state })}`, { signal });
export const getJob = (id, { signal } = {}) => call("GET", jobPath(id), { signal });
export const latestRanks = async (id, { signal } = {}) => (await call("GET", jobPath(id, "/ranks"), { signal })).ranks;
export const getCluster = ({ signal } = {}) => call("GET", "/v1/cluster", { signal });
export const signOut = () => call("DELETE", "/dashboard/session");

export const resizeJob = (id, workers, { version }) =>
  call("PATCH", jobPath(id), { body: { workers }, headers: { "If-Match": String(version) } });
// action: "cancel", "pause" or "resume".
export const actOnJob = (id, action) => call("POST", jobPath(id, `/${action}`));
export const saveCheckpoint = (id) => call("POST", jobPath(id, "/checkpoints"));

export const streamPath = (id, after) => `${jobPath(id, "/stream")}${query({ after })}`;

// Pages of a job's timeline from `after` on, oldest first, until there are no more.
export const eventPages = (id, options) => pages(jobPath(id, "/events"), "events", options);
export const rankPages = (id, rank, options) => pages(jobPath(id, `/ranks/${rank}/history`), "reports", options);

async function* pages(path, name, { after = 0, signal }) {
  for (;;) {
    const answer = await call("GET", `${path}${query({ after, limit: PAGE })}`, { signal });
    const items = answer[name];
    if (!items.length) return;
    yield { items, next: answer.next_after };
    if (!(answer.next_after > after)) return;
    after = answer.next_after;
  }
}
