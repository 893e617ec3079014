/* SPDX-License-Identifier: Apache-2.0 */
/*
 * One thread of libmicrohttpd accepts, reads, replies and writes. It posts a request to
 * the loop's mailbox and waits while the loop copies the figures. A client that asks more
 * often than every FRESH_NS gets the previous copy, so any number of requests takes at
 * most a few turns a second. If the loop does not answer for ANSWER_NS the request is a
 * 503: this is the purpose of /livez.
 *
 * Clients may be slow or never finish. They do not delay each other, since no write
 * blocks, and the oldest connection makes room for a new one, so idle clients cannot lock
 * out others. The memory of a connection is limited by CONNECTION_BYTES and one copy of
 * the text.
 */
#include "daemon/metrics/http.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/base/clock.h"
#include "daemon/base/context.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/base/text.h"
#include "daemon/config/config.h"
#include "daemon/loop/mailbox.h"
#include "daemon/metrics/figures.h"
#include "daemon/metrics/http_lib.h"
#include "daemon/metrics/http_listen.h"

#define CONNECTIONS_MAX 16u
#define CONNECTION_BYTES ((size_t)16 << 10) /* of a request */
#define IDLE_S 10u
#define FRESH_NS UINT64_C(100000000)
#define ANSWER_NS UINT64_C(1000000000)

struct http {
	struct kvd *kvd;
	const struct http_lib *lib;
	struct http_listen listen;
	struct MHD_Daemon *server;
	struct mailbox box;
	struct list note; /* in the mailbox: a request for figures */
	bool asked;	  /* the loop may write the figures: they are not being read */
	pthread_mutex_t lock;
	pthread_cond_t changed;
	bool closing;
	struct figures figures;
	/* used by the server's thread */
	uint64_t taken_ns;	      /* time of the copy; 0: none */
	struct MHD_Response *exposed; /* its text; NULL: not formatted yet */
	struct list connections;      /* oldest first */
	unsigned int connection_count;
};

/* ---- figures ---- */

static void on_note(struct mailbox *box, struct list *item)
{
	struct http *http = container_of(box, struct http, box);

	(void)item;
	figures_take(http->kvd, &http->figures);
	pthread_mutex_lock(&http->lock);
	http->asked = false;
	pthread_cond_signal(&http->changed);
	pthread_mutex_unlock(&http->lock);
}

/* False: the loop does not respond. */
static bool http_ask(struct http *http)
{
	struct timespec until = clock_after(ANSWER_NS);
	bool answered;

	pthread_mutex_lock(&http->lock);
	if (!http->asked) { /* otherwise the loop has the last request */
		http->asked = true;
		mailbox_put(&http->box, &http->note);
	}
	while (http->asked && !http->closing &&
	       pthread_cond_clockwait(&http->changed, &http->lock, CLOCK_MONOTONIC,
				      &until) == 0)
		;
	answered = !http->asked && !http->closing;
	pthread_mutex_unlock(&http->lock);
	return answered;
}

static void exposed_drop(struct http *http)
{
	if (http->exposed)
		http->lib->MHD_destroy_response(http->exposed);
	http->exposed = NULL;
}

/* NULL: the loop does not respond. */
static struct figures *http_figures(struct http *http)
{
	if (http->taken_ns && clock_ns() - http->taken_ns < FRESH_NS)
		return &http->figures;
	exposed_drop(http);
	http->taken_ns = 0;
	if (!http_ask(http))
		return NULL;
	http->taken_ns = clock_ns();
	figures_read_process(&http->figures);
	return &http->figures;
}

/* ---- answers ---- */

/* One connection per request: scrapers connect at intervals of many seconds. */
static struct MHD_Response *answer_make(struct http *http, const char *type,
					const char *text, size_t len)
{
	struct MHD_Response *answer = http->lib->MHD_create_response_from_buffer(
		len, (void *)(uintptr_t)text, MHD_RESPMEM_MUST_COPY);
	static const struct {
		const char *name, *value;
	} heads[] = {{"Connection", "close"},
		     {"Cache-Control", "no-store"},
		     {"X-Content-Type-Options", "nosniff"}};

	for (size_t i = 0; answer && i < ARRAY_LEN(heads); i++)
		http->lib->MHD_add_response_header(answer, heads[i].name, heads[i].value);
	if (answer)
		http->lib->MHD_add_response_header(answer, "Content-Type", type);
	return answer;
}

static enum MHD_Result answer_send(struct http *http, struct MHD_Connection *c,
				   unsigned int status, struct MHD_Response *answer)
{
	enum MHD_Result r =
		answer ? http->lib->MHD_queue_response(c, status, answer) : MHD_NO;

	if (answer)
		http->lib->MHD_destroy_response(answer);
	return r;
}

static enum MHD_Result answer_text(struct http *http, struct MHD_Connection *c,
				   unsigned int status, const char *text)
{
	struct MHD_Response *answer =
		answer_make(http, "text/plain; charset=utf-8", text, strlen(text));

	if (answer && status == MHD_HTTP_METHOD_NOT_ALLOWED)
		http->lib->MHD_add_response_header(answer, "Allow", "GET, HEAD");
	return answer_send(http, c, status, answer);
}

static enum MHD_Result answer_stuck(struct http *http, struct MHD_Connection *c)
{
	return answer_text(http, c, MHD_HTTP_SERVICE_UNAVAILABLE,
			   "the event loop does not respond\n");
}

static enum MHD_Result serve_metrics(struct http *http, struct MHD_Connection *c)
{
	const struct figures *f = http_figures(http);
	struct text text = {0};

	if (!f)
		return answer_stuck(http, c);
	if (!http->exposed) {
		figures_expose(f, &text);
		if (!text.failed)
			http->exposed = answer_make(
				http, "text/plain; version=0.0.4; charset=utf-8",
				text.data, text.len);
		text_fini(&text);
	}
	return http->exposed
		       ? http->lib->MHD_queue_response(c, MHD_HTTP_OK, http->exposed)
		       : MHD_NO;
}

static enum MHD_Result serve_live(struct http *http, struct MHD_Connection *c)
{
	return http_figures(http) ? answer_text(http, c, MHD_HTTP_OK, "ok\n")
				  : answer_stuck(http, c);
}

static enum MHD_Result serve_ready(struct http *http, struct MHD_Connection *c)
{
	const struct figures *f = http_figures(http);
	char text[ERR_TEXT_MAX + 32];

	if (!f)
		return answer_stuck(http, c);
	snprintf(text, sizeof(text), "%s%s%s\n", health_names[f->health],
		 f->why[0] ? ": " : "", f->why);
	return answer_text(http, c,
			   f->health == HEALTH_SERVING || f->health == HEALTH_DEGRADED
				   ? MHD_HTTP_OK
				   : MHD_HTTP_SERVICE_UNAVAILABLE,
			   text);
}

static const struct {
	const char *path;
	enum MHD_Result (*serve)(struct http *http, struct MHD_Connection *c);
} routes[] = {
	{"/metrics", serve_metrics},
	{"/livez", serve_live},
	{"/readyz", serve_ready},
};

static enum MHD_Result on_request(void *arg, struct MHD_Connection *c, const char *path,
				  const char *method, const char *version,
				  const char *body, size_t *body_len, void **state)
{
	struct http *http = arg;

	(void)version;
	(void)body;
	(void)body_len;
	if (strcmp(method, "GET") != 0 && strcmp(method, "HEAD") != 0)
		return answer_text(http, c, MHD_HTTP_METHOD_NOT_ALLOWED,
				   "only GET and HEAD are supported\n");
	if (!*state) { /* the header has been read; the reply follows at the second
			* call */
		*state = http;
		return MHD_YES;
	}
	for (size_t i = 0; i < ARRAY_LEN(routes); i++)
		if (strcmp(path, routes[i].path) == 0)
			return routes[i].serve(http, c);
	return answer_text(http, c, MHD_HTTP_NOT_FOUND,
			   "not found; use /metrics, /livez or /readyz\n");
}

/* ---- connections ---- */

struct connection {
	struct list link;
	int fd;
};

/* The server detects the end of the stream, and closes it. */
static void connection_end(struct http *http, struct connection *connection)
{
	shutdown(connection->fd, SHUT_RDWR);
	list_remove(&connection->link);
	http->connection_count--;
}

static void on_connection(void *arg, struct MHD_Connection *c, void **state,
			  enum MHD_ConnectionNotificationCode what)
{
	struct http *http = arg;
	struct connection *connection = *state;

	if (what == MHD_CONNECTION_NOTIFY_CLOSED) {
		if (connection && !list_empty(&connection->link)) {
			list_remove(&connection->link);
			http->connection_count--;
		}
		mem_free(connection);
		*state = NULL;
		return;
	}
	int fd = http->lib->MHD_get_connection_info(c, MHD_CONNECTION_INFO_CONNECTION_FD)
			 ->connect_fd;

	connection = mem_zalloc(sizeof(*connection));
	*state = connection;
	if (!connection) {
		shutdown(fd, SHUT_RDWR); /* one that could not be closed for others */
		return;
	}
	connection->fd = fd;
	list_push_back(&http->connections, &connection->link);
	if (++http->connection_count > CONNECTIONS_MAX)
		connection_end(http,
			       list_first(&http->connections, struct connection, link));
}

/* ---- life ---- */

static int server_start(struct http *http)
{
	sigset_t all, old;

	/* its thread leaves signals to the loop */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	http->server = http->lib->MHD_start_daemon(
		MHD_USE_EPOLL_INTERNAL_THREAD, 0, NULL, NULL, on_request, http,
		MHD_OPTION_LISTEN_SOCKET, http->listen.fd, MHD_OPTION_CONNECTION_LIMIT,
		4 * CONNECTIONS_MAX, MHD_OPTION_CONNECTION_TIMEOUT, IDLE_S,
		MHD_OPTION_CONNECTION_MEMORY_LIMIT, CONNECTION_BYTES,
		MHD_OPTION_NOTIFY_CONNECTION, on_connection, http, MHD_OPTION_END);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (!http->server)
		return err_raise(ERR_IO,
				 "metrics_listen: libmicrohttpd cannot start at %s",
				 http->kvd->config->metrics_listen);
	return 0;
}

int http_new(struct kvd *kvd, struct http **http_p)
{
	struct http *http;
	int r;

	*http_p = NULL;
	if (!kvd->config->metrics_listen[0])
		return 0;
	http = mem_zalloc(sizeof(*http));
	if (!http)
		return err_pass(-ENOMEM);
	http->kvd = kvd;
	http->listen.fd = -1;
	list_init(&http->note);
	list_init(&http->connections);
	pthread_mutex_init(&http->lock, NULL);
	pthread_cond_init(&http->changed, NULL);
	r = http_lib_load(&http->lib);
	if (r == 0)
		r = mailbox_init(&http->box, kvd->loop, on_note);
	if (r == 0)
		r = http_listen_open(kvd->config, &http->listen);
	if (r == 0)
		r = server_start(http);
	if (r < 0) {
		http_free(http);
		return err_pass(r);
	}
	log_info("metrics", NULL, "served", "at=%s", kvd->config->metrics_listen);
	*http_p = http;
	return 0;
}

void http_free(struct http *http)
{
	if (!http)
		return;
	pthread_mutex_lock(&http->lock);
	http->closing = true;
	pthread_cond_signal(&http->changed);
	pthread_mutex_unlock(&http->lock);
	if (http->server)
		http->listen.fd = -1; /* is closed by the server */
	http_listen_close(&http->listen);
	if (http->server)
		http->lib->MHD_stop_daemon(http->server); /* its thread has ended */
	exposed_drop(http);
	mailbox_fini(&http->box);
	pthread_cond_destroy(&http->changed);
	pthread_mutex_destroy(&http->lock);
	mem_free(http);
}
