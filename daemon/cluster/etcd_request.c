/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcurl's multi interface on the loop. A request without a reply ends the link, by a
 * timer of our own that each piece of the reply restarts: a long range may be slow, a
 * dead etcd is detected.
 *
 * All connections are closed when the link fails: otherwise one cut by a partition would
 * be taken from libcurl's cache, and continue at its retransmission timer. Names are not
 * resolved here, proxies of the environment and redirections are not followed. libcurl
 * reads at most a hundred buffers in one call: small ones bound the parsing and reports
 * in a turn.
 */
#include <assert.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>

#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/cluster/etcd_impl.h"

#define REQUEST_BUFFER 1024L
#define REQUEST_CONNECT_MS 2000L
#define REQUEST_MOST_NS (120 * LOOP_NS_PER_S) /* a page of a range */
#define STREAM_DEAD_MS 20000u		      /* of a silent peer host */

/* ---- libcurl's sockets and timer ---- */

static void request_end(struct etcd_request *request, CURLcode code);

/* Requests that have ended since. */
static void curl_reap(struct etcd *e)
{
	const struct etcd_lib *lib = e->lib;
	CURLMsg *message;
	int left;

	while (e->multi && (message = lib->curl_multi_info_read(e->multi, &left))) {
		void *request = NULL;

		if (message->msg != CURLMSG_DONE)
			continue;
		lib->curl_easy_getinfo(message->easy_handle, CURLINFO_PRIVATE, &request);
		request_end(request, message->data.result);
	}
	if (e->sick) {
		struct err err;

		e->sick = false;
		err_set(&err, ERR_NOMEM, "etcd: cannot watch a socket");
		etcd_link_broken(e, &err);
	}
}

static void curl_act(struct etcd *e, curl_socket_t fd, int events)
{
	int running;

	e->in_curl = true;
	if (e->lib->curl_multi_socket_action(e->multi, fd, events, &running) != CURLM_OK)
		e->sick = true;
	e->in_curl = false;
	curl_reap(e);
}

static void curl_on_ready(struct loop_fd *watch, int events)
{
	struct etcd_socket *s = container_of(watch, struct etcd_socket, watch);

	curl_act(s->etcd, watch->fd,
		 (events & LOOP_READ ? CURL_CSELECT_IN : 0) |
			 (events & LOOP_WRITE ? CURL_CSELECT_OUT : 0));
}

static void curl_on_timer(struct loop_timer *timer)
{
	curl_act(container_of(timer, struct etcd, curl_timer), CURL_SOCKET_TIMEOUT, 0);
}

static int curl_on_timeout(CURLM *multi, long ms, void *arg)
{
	struct etcd *e = arg;

	(void)multi;
	if (ms < 0)
		loop_timer_stop(&e->curl_timer);
	else
		loop_timer_start(&e->curl_timer, (uint64_t)ms * LOOP_NS_PER_MS);
	return 0;
}

static struct etcd_socket *curl_socket(struct etcd *e, curl_socket_t fd)
{
	for (unsigned int i = 0; i < ETCD_SOCKETS_MAX; i++) {
		struct etcd_socket *s = &e->sockets[i];

		if (s->used)
			continue;
		s->used = true;
		s->etcd = e;
		loop_fd_init(&s->watch, e->loop, fd, curl_on_ready);
		e->lib->curl_multi_assign(e->multi, fd, s);
		return s;
	}
	return NULL;
}

static int curl_on_socket(CURL *easy, curl_socket_t fd, int what, void *arg, void *known)
{
	struct etcd_socket *s = known;
	struct etcd *e = arg;

	(void)easy;
	if (what == CURL_POLL_REMOVE) {
		if (s) {
			loop_fd_stop(&s->watch);
			s->used = false;
		}
		return 0;
	}
	if (!s)
		s = curl_socket(e, fd);
	if (!s ||
	    loop_fd_set(&s->watch, (what & CURL_POLL_IN ? LOOP_READ : 0) |
					   (what & CURL_POLL_OUT ? LOOP_WRITE : 0)) < 0) {
		err_clear();
		e->sick = true; /* the link is given up, behind this call */
	}
	return 0;
}

void etcd_requests_init(struct etcd *e)
{
	list_init(&e->requests);
	loop_timer_init(&e->curl_timer, e->loop, curl_on_timer);
}

static int curl_begin(struct etcd *e)
{
	const struct etcd_lib *lib = e->lib;
	CURLM *multi = lib->curl_multi_init();

	if (!multi)
		return err_raise(ERR_NOMEM, "etcd: libcurl");
	lib->curl_multi_setopt(multi, CURLMOPT_SOCKETFUNCTION, curl_on_socket);
	lib->curl_multi_setopt(multi, CURLMOPT_SOCKETDATA, e);
	lib->curl_multi_setopt(multi, CURLMOPT_TIMERFUNCTION, curl_on_timeout);
	lib->curl_multi_setopt(multi, CURLMOPT_TIMERDATA, e);
	lib->curl_multi_setopt(multi, CURLMOPT_PIPELINING, (long)CURLPIPE_NOTHING);
	lib->curl_multi_setopt(multi, CURLMOPT_MAXCONNECTS, 4L);
	e->multi = multi;
	return 0;
}

void etcd_curl_fini(struct etcd *e)
{
	loop_timer_stop(&e->curl_timer);
	if (e->multi)
		e->lib->curl_multi_cleanup(e->multi);
	e->multi = NULL;
	loop_timer_stop(&e->curl_timer);
	for (unsigned int i = 0; i < ETCD_SOCKETS_MAX; i++)
		if (e->sockets[i].used) {
			loop_fd_stop(&e->sockets[i].watch);
			e->sockets[i].used = false;
		}
}

void etcd_curl_wait(struct etcd *e, const struct etcd_request *request, uint64_t most_ns)
{
	uint64_t end_ns = loop_clock_ns(e->loop) + most_ns;

	while (etcd_request_busy(request) && loop_clock_ns(e->loop) < end_ns) {
		struct pollfd fds[ETCD_SOCKETS_MAX];
		nfds_t count = 0;

		for (unsigned int i = 0; i < ETCD_SOCKETS_MAX; i++) {
			const struct etcd_socket *s = &e->sockets[i];

			if (s->used)
				fds[count++] = (struct pollfd){
					.fd = s->watch.fd,
					.events = (short)((s->watch.events & LOOP_READ
								   ? POLLIN
								   : 0) |
							  (s->watch.events & LOOP_WRITE
								   ? POLLOUT
								   : 0))};
		}
		if (poll(fds, count, 10) < 0 && errno != EINTR)
			return;
		for (nfds_t i = 0; i < count && e->multi; i++)
			if (fds[i].revents)
				curl_act(e, fds[i].fd,
					 (fds[i].revents & POLLOUT ? CURL_CSELECT_OUT
								   : 0) |
						 (fds[i].revents & ~POLLOUT
							  ? CURL_CSELECT_IN
							  : 0));
		if (e->multi)
			curl_act(e, CURL_SOCKET_TIMEOUT, 0);
	}
}

/* ---- texts ---- */

void etcd_put_key(struct text *text, const char *name, const char *key)
{
	out_base64(text, name, (const uint8_t *)key, strlen(key));
}

/* ---- the answer ---- */

static struct etcd_request *request_of(struct etcd_parser *parser)
{
	/* the parser's block ends with its request */
	return *(struct etcd_request **)(void *)(parser + 1);
}

static void request_on_kv(struct etcd_parser *parser, const struct etcd_kv *kv)
{
	struct etcd_request *request = request_of(parser);

	if (request->on_kv)
		request->on_kv(request, kv);
}

static void request_on_message(struct etcd_parser *parser, const struct etcd_message *m)
{
	struct etcd_request *request = request_of(parser);

	request->answer = *m;
	if (request->on_message)
		request->on_message(request, m);
}

static void request_patience(struct etcd_request *request)
{
	struct etcd *e = request->etcd;
	uint64_t now_ns = loop_now_ns(e->loop), left_ns;

	if (request->stream && request->bytes) {
		loop_timer_stop(&request->timer);
		return;
	}
	left_ns = request->end_ns > now_ns ? request->end_ns - now_ns : 0;
	loop_timer_start(&request->timer,
			 left_ns < request->patience_ns ? left_ns : request->patience_ns);
}

static size_t request_on_bytes(char *bytes, size_t size, size_t count, void *arg)
{
	struct etcd_request *request = arg;
	size_t len = size * count;

	request->bytes += len;
	request_patience(request);
	if (etcd_parser_feed(request->parser, bytes, len) < 0) {
		request->bad = err_last()->code != ERR_NOMEM;
		err_clear();
		return 0; /* libcurl ends it */
	}
	return len;
}

static int request_on_socket(void *arg, curl_socket_t fd, curlsocktype purpose)
{
	unsigned int ms = STREAM_DEAD_MS;

	(void)arg;
	(void)purpose;
	(void)setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof(ms));
	return CURL_SOCKOPT_OK;
}

/* ---- life ---- */

static void request_clear(struct etcd_request *request)
{
	struct etcd *e = request->etcd;

	list_remove(&request->link);
	loop_timer_stop(&request->timer);
	if (request->easy) {
		if (e->multi)
			e->lib->curl_multi_remove_handle(e->multi, request->easy);
		e->lib->curl_easy_cleanup(request->easy);
	}
	e->lib->curl_slist_free_all(request->headers);
	e->lib->curl_slist_free_all(request->route);
	request->easy = NULL;
	request->headers = request->route = NULL;
	mem_free(mem_steal(request->body));
	mem_free(mem_steal(request->parser));
}

static void request_on_timer(struct loop_timer *timer)
{
	struct etcd_request *request = container_of(timer, struct etcd_request, timer);
	struct etcd *e = request->etcd;
	struct err err;

	err_set(&err, ERR_TIMEOUT, "etcd %s:%s: no response in %ju ms",
		e->url.endpoints[e->link.endpoint].host,
		e->url.endpoints[e->link.endpoint].port,
		(uintmax_t)(request->patience_ns / LOOP_NS_PER_MS));
	etcd_link_broken(e, &err);
}

/* Errors of the etcd member, or of our token, and not of the request. */
static bool request_is_broken(struct etcd *e, const struct etcd_message *answer)
{
	enum { DEADLINE = 4, UNAVAILABLE = 14, UNAUTHENTICATED = 16 };

	if (e->user && e->link.token[0] &&
	    (answer->error_code == UNAUTHENTICATED ||
	     strstr(answer->error, "invalid auth token") ||
	     strstr(answer->error, "auth store is old"))) {
		e->link.token[0] = '\0';
		return true;
	}
	return answer->error_code == DEADLINE || answer->error_code == UNAVAILABLE;
}

/* libcurl has no more for us. */
static void request_end(struct etcd_request *request, CURLcode code)
{
	struct etcd *e = request->etcd;
	const struct cluster_endpoint *at = &e->url.endpoints[e->link.endpoint];
	const struct etcd_message *answer = &request->answer;
	struct err err;
	long http = 0;

	e->lib->curl_easy_getinfo(request->easy, CURLINFO_RESPONSE_CODE, &http);
	if (request->bad)
		err_set(&err, ERR_PROTO,
			"etcd %s:%s: HTTP %ld: not an etcd JSON gateway response; is it "
			"etcd 3.4 or later, and its client port?",
			at->host, at->port, http);
	else if (code != CURLE_OK)
		err_set(&err, ERR_IO, "etcd %s:%s: %s", at->host, at->port,
			e->lib->curl_easy_strerror(code));
	else if (!etcd_parser_whole(request->parser))
		err_set(&err, ERR_PROTO, "etcd %s:%s: HTTP %ld with a truncated response",
			at->host, at->port, http);
	else if (answer->failed && request_is_broken(e, answer))
		err_set(&err, ERR_IO, "etcd %s:%s: %s", at->host, at->port,
			answer->error);
	else if (request->stream && !answer->failed)
		err_set(&err, ERR_IO, "etcd %s:%s: the watch stream ended", at->host,
			at->port);
	else if (http != 200 && !answer->failed)
		err_set(&err, ERR_PROTO,
			"etcd %s:%s: HTTP %ld: not an etcd JSON gateway error; is it "
			"etcd 3.4 or later, and its client port?",
			at->host, at->port, http);
	else {
		if (answer->revision > e->revision)
			e->revision = answer->revision;
		request_clear(request);
		request->on_done(request, answer->failed ? ETCD_REFUSED : ETCD_ANSWERED);
		return;
	}
	etcd_link_broken(e, &err);
}

void etcd_request_init(struct etcd *e, struct etcd_request *request,
		       void (*on_done)(struct etcd_request *request,
				       enum etcd_outcome outcome))
{
	*request = (struct etcd_request){
		.etcd = e, .on_done = on_done, .patience_ns = e->patience_ns};
	list_init(&request->link);
	loop_timer_init(&request->timer, e->loop, request_on_timer);
}

static int request_lists(struct etcd_request *request)
{
	static const char *const fixed[] = {"Content-Type: application/json", "Expect:"};
	struct etcd *e = request->etcd;
	const struct cluster_endpoint *at = &e->url.endpoints[e->link.endpoint];
	char line[ETCD_TOKEN_MAX + 32];
	struct curl_slist *list;

	for (unsigned int i = 0; i < ARRAY_LEN(fixed) + 1; i++) {
		if (i < ARRAY_LEN(fixed))
			snprintf(line, sizeof(line), "%s", fixed[i]);
		else if (e->link.token[0])
			snprintf(line, sizeof(line), "Authorization: %s", e->link.token);
		else
			break;
		list = e->lib->curl_slist_append(request->headers, line);
		if (!list)
			return err_raise(ERR_NOMEM, "etcd: a request");
		request->headers = list;
	}
	snprintf(line, sizeof(line), "::%s:%s", e->link.numbers[e->link.address],
		 at->port);
	request->route = e->lib->curl_slist_append(NULL, line);
	return request->route ? 0 : err_raise(ERR_NOMEM, "etcd: a request");
}

#define REQUEST_SET(option, value) \
	(code = code == CURLE_OK ? lib->curl_easy_setopt(easy, option, value) : code)

static CURLcode request_tls(struct etcd *e, CURL *easy)
{
	const struct etcd_lib *lib = e->lib;
	CURLcode code = CURLE_OK;

	REQUEST_SET(CURLOPT_SSLVERSION, (long)CURL_SSLVERSION_TLSv1_2);
	REQUEST_SET(CURLOPT_CAINFO, e->ca);
	REQUEST_SET(CURLOPT_CAPATH, NULL);
	if (e->cert) {
		REQUEST_SET(CURLOPT_SSLCERT, e->cert);
		REQUEST_SET(CURLOPT_SSLKEY, e->key);
	}
	return code;
}

static int request_setup(struct etcd_request *request, const char *path)
{
	struct etcd *e = request->etcd;
	const struct cluster_endpoint *at = &e->url.endpoints[e->link.endpoint];
	const struct etcd_lib *lib = e->lib;
	CURL *easy = request->easy;
	CURLcode code = CURLE_OK;
	char url[CLUSTER_HOST_MAX + 64];
	bool v6 = strchr(at->host, ':');

	snprintf(url, sizeof(url), "%s://%s%s%s:%s/v3/%s", e->url.tls ? "https" : "http",
		 v6 ? "[" : "", at->host, v6 ? "]" : "", at->port, path);
	REQUEST_SET(CURLOPT_URL, url);
	REQUEST_SET(CURLOPT_PRIVATE, request);
	REQUEST_SET(CURLOPT_NOSIGNAL, 1L);
	REQUEST_SET(CURLOPT_PROXY, "");
	REQUEST_SET(CURLOPT_NETRC, (long)CURL_NETRC_IGNORED);
	REQUEST_SET(CURLOPT_FOLLOWLOCATION, 0L);
	REQUEST_SET(CURLOPT_HTTP_VERSION, (long)CURL_HTTP_VERSION_1_1);
	REQUEST_SET(CURLOPT_CONNECT_TO, request->route);
	REQUEST_SET(CURLOPT_CONNECTTIMEOUT_MS, REQUEST_CONNECT_MS);
	REQUEST_SET(CURLOPT_BUFFERSIZE, REQUEST_BUFFER);
	REQUEST_SET(CURLOPT_TCP_KEEPALIVE, 1L);
	REQUEST_SET(CURLOPT_TCP_KEEPIDLE, 10L);
	REQUEST_SET(CURLOPT_TCP_KEEPINTVL, 5L);
	REQUEST_SET(CURLOPT_SOCKOPTFUNCTION, request_on_socket);
	REQUEST_SET(CURLOPT_HTTPHEADER, request->headers);
	REQUEST_SET(CURLOPT_POST, 1L);
	REQUEST_SET(CURLOPT_POSTFIELDS, request->body);
	REQUEST_SET(CURLOPT_POSTFIELDSIZE, (long)strlen(request->body));
	REQUEST_SET(CURLOPT_WRITEFUNCTION, request_on_bytes);
	REQUEST_SET(CURLOPT_WRITEDATA, request);
	if (code == CURLE_OK && e->url.tls)
		code = request_tls(e, easy);
	if (code == CURLE_OUT_OF_MEMORY)
		return err_raise(ERR_NOMEM, "etcd: a request");
	if (code != CURLE_OK)
		return err_raise(ERR_REQUIRE, "etcd: libcurl: %s",
				 lib->curl_easy_strerror(code));
	return 0;
}

static int request_parser(struct etcd_request *request)
{
	struct etcd_parser *parser = mem_alloc(sizeof(*parser) + sizeof(request));

	if (!parser)
		return err_pass(-ENOMEM);
	etcd_parser_init(parser);
	parser->on_kv = request_on_kv;
	parser->on_message = request_on_message;
	*(struct etcd_request **)(void *)(parser + 1) = request;
	request->parser = parser;
	return 0;
}

int etcd_request_start(struct etcd_request *request, const char *path, struct text *body)
{
	struct etcd *e = request->etcd;
	int r = 0;

	assert(!e->in_curl);
	request->answer = (struct etcd_message){.watch_id = 0};
	request->bytes = 0;
	request->bad = false;
	request->body = body->failed ? NULL : mem_steal(body->data);
	text_fini(body);
	if (!request->body)
		r = err_raise(ERR_NOMEM, "etcd: a request");
	if (r == 0 && !e->multi)
		r = curl_begin(e);
	if (r == 0)
		r = request_parser(request);
	if (r == 0)
		r = request_lists(request);
	if (r == 0) {
		request->easy = e->lib->curl_easy_init();
		r = request->easy ? request_setup(request, path)
				  : err_raise(ERR_NOMEM, "etcd: a request");
	}
	if (r == 0 && e->lib->curl_multi_add_handle(e->multi, request->easy) != CURLM_OK)
		r = err_raise(ERR_NOMEM, "etcd: a request");
	if (r < 0) {
		request_clear(request);
		return err_pass(r);
	}
	list_push_back(&e->requests, &request->link);
	request->end_ns = loop_now_ns(e->loop) + REQUEST_MOST_NS;
	request_patience(request);
	return 0;
}

void etcd_request_cancel(struct etcd_request *request)
{
	assert(!request->etcd->in_curl);
	request_clear(request);
}

void etcd_requests_break(struct etcd *e)
{
	struct list ended;
	struct etcd_request *request;
	struct list *link;

	list_init(&ended);
	list_foreach_safe(request, &e->requests, link) {
		request_clear(request);
		list_push_back(&ended, &request->link);
	}
	etcd_curl_fini(e);
	while ((link = list_pop_front(&ended))) {
		request = list_entry(link, struct etcd_request, link);
		request->on_done(request, ETCD_BROKEN);
	}
}
