/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The data port: one listening socket a daemon, for control lines and streams of
 * all peers.
 *
 * Who connects is a guest until he has shown whose he is: a control line by the
 * token that the handshake gave him, a stream by a pass that its control line
 * was given. Both are compared in constant time and serve once: a peer that has
 * a control line, a stream that is up, asks for no other. A guest whose token
 * nobody knows may be early, his peer being opened a moment later, so he waits;
 * but no longer than the connect time. Of those who have not said whose they are, and
 * of those whom nobody knows, there are so many at most, and the oldest leaves for the
 * next: whoever floods the door with one kind pushes out that kind, and who comes in
 * his turn has said his token before as many others have come after him. Who is pushed
 * out dials again.
 */
#include "daemon/transport/tcp/tcp_impl.h"

#include <arpa/inet.h>
#include <errno.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"

#define BACKLOG 128
#define ACCEPTS_A_TURN 16u

struct tcp_guest {
	struct list link; /* transport->guests, oldest first */
	struct tcp_transport *transport;
	struct loop_fd watch;
	int fd;
	uint8_t bytes[TCP_HELLO_BYTES];
	size_t got;
	bool complete;
	struct tcp_hello hello;
	uint64_t deadline_ns;
};

static void guest_free(struct tcp_guest *guest)
{
	list_remove(&guest->link);
	guest->transport->guest_counts[guest->complete]--;
	loop_fd_stop(&guest->watch);
	mem_closep(&guest->fd);
	mem_free(guest);
}

static int guest_take_fd(struct tcp_guest *guest)
{
	int fd = mem_steal_fd(&guest->fd);

	guest_free(guest);
	return fd;
}

/* ---- whose he is ---- */

static bool waits_for_control(const struct tcp_peer *peer, const struct tcp_guest *guest)
{
	return !peer->net.dial && net_peer_live(&peer->net) &&
	       sm_state(&peer->net.sm) == NET_PEER_OPENING &&
	       tcp_token_equal(guest->hello.token, peer->net.token_in);
}

void tcp_guests_meet(struct tcp_peer *peer)
{
	struct tcp_guest *guest;

	list_foreach(guest, &peer->transport->guests, link) {
		struct tcp_hello hello = guest->hello;

		if (!guest->complete || !waits_for_control(peer, guest))
			continue;
		tcp_join_control(peer, guest_take_fd(guest), &hello);
		return;
	}
}

static void meet_control(struct tcp_guest *guest)
{
	struct tcp_hello hello = guest->hello;
	struct tcp_peer *peer;

	list_foreach(peer, &guest->transport->net.peers, net.link) {
		if (!waits_for_control(peer, guest))
			continue;
		tcp_join_control(peer, guest_take_fd(guest), &hello);
		return;
	}
	/* its peer is not opened yet: the handshake may be a moment behind */
}

/* Passes exist before their dialer hears of them: nobody comes too early. */
static void meet_stream(struct tcp_guest *guest)
{
	struct tcp_peer *peer;

	list_foreach(peer, &guest->transport->net.peers, net.link) {
		if (peer->net.dial || !net_peer_live(&peer->net) ||
		    sm_state(&peer->net.sm) != NET_PEER_JOINING)
			continue;
		for (unsigned int i = 0; i < peer->stream_count; i++) {
			struct tcp_stream *stream = &peer->streams[i];

			if (stream->up ||
			    !tcp_token_equal(guest->hello.token, stream->pass))
				continue;
			tcp_join_stream(stream, guest_take_fd(guest));
			return;
		}
	}
	log_warn("tcp", NULL, "refused a connection",
		 "reason=\"a pass that nobody gave\"");
	guest_free(guest);
}

static void make_room(struct tcp_transport *transport, bool complete)
{
	struct tcp_guest *guest;

	if (transport->guest_counts[complete] < TCP_GUESTS_MAX)
		return;
	list_foreach(guest, &transport->guests, link) {
		if (guest->complete != complete)
			continue;
		guest_free(guest);
		return;
	}
}

static void guest_introduce(struct tcp_guest *guest)
{
	struct tcp_transport *transport = guest->transport;
	int r = tcp_hello_get(guest->bytes, &guest->hello);

	loop_fd_stop(&guest->watch);
	if (r == 0 && guest->hello.role != TCP_CONTROL && guest->hello.role != TCP_STREAM)
		r = err_raise(ERR_PROTO, "tcp: an answer that nobody asked for");
	if (r < 0) {
		log_warn("tcp", NULL, "refused a connection", "reason=\"%s\"",
			 err_last()->text);
		err_clear();
		guest_free(guest);
		return;
	}
	make_room(transport, true);
	transport->guest_counts[false]--;
	transport->guest_counts[true]++;
	guest->complete = true;
	if (guest->hello.role == TCP_CONTROL)
		meet_control(guest);
	else
		meet_stream(guest);
}

static void guest_read(struct tcp_guest *guest)
{
	ssize_t n = recv(guest->fd, guest->bytes + guest->got,
			 sizeof(guest->bytes) - guest->got, MSG_DONTWAIT);

	if (n < 0 && (errno == EAGAIN || errno == EINTR))
		return;
	if (n <= 0) {
		guest_free(guest);
		return;
	}
	guest->got += (size_t)n;
	if (guest->got == sizeof(guest->bytes))
		guest_introduce(guest);
}

static void on_guest(struct loop_fd *watch, int events)
{
	(void)events;
	guest_read(container_of(watch, struct tcp_guest, watch));
}

/* ---- the door ---- */

static void guest_new(struct tcp_transport *transport, int owned_fd)
{
	struct tcp_guest *guest = mem_zalloc(sizeof(*guest));

	if (!guest) {
		err_clear();
		close(owned_fd);
		return;
	}
	make_room(transport, false);
	guest->transport = transport;
	guest->fd = owned_fd;
	guest->deadline_ns =
		loop_now_ns(transport->net.base.env.loop) + transport->connect_ns;
	list_init(&guest->link);
	list_push_back(&transport->guests, &guest->link);
	transport->guest_counts[false]++;
	loop_fd_init(&guest->watch, transport->net.base.env.loop, owned_fd, on_guest);
	if (loop_fd_set(&guest->watch, LOOP_READ) < 0) {
		err_clear();
		guest_free(guest);
		return;
	}
	tcp_tick_want(transport);
	guest_read(guest); /* who dials says so at once: it is usually here already */
}

static void on_connection(struct loop_fd *watch, int events)
{
	struct tcp_transport *transport =
		container_of(watch, struct tcp_transport, watch);

	(void)events;
	for (unsigned int budget = ACCEPTS_A_TURN; budget > 0; budget--) {
		int fd = accept4(transport->listen_fd, NULL, NULL,
				 SOCK_CLOEXEC | SOCK_NONBLOCK);

		if (fd >= 0) {
			guest_new(transport, fd);
			continue;
		}
		if (errno == EMFILE || errno == ENFILE || errno == ENOMEM) {
			/* the backlog stays readable: rest until the tick */
			log_warn("tcp", NULL, "cannot accept", "reason=\"%s\"",
				 strerror(errno));
			loop_fd_stop(&transport->watch);
			transport->resting = true;
			tcp_tick_want(transport);
		}
		return;
	}
}

void tcp_guests_tick(struct tcp_transport *transport, bool *wanted_p)
{
	struct tcp_guest *guest;

	list_foreach_safe(guest, &transport->guests, link) {
		if (loop_now_ns(transport->net.base.env.loop) < guest->deadline_ns) {
			*wanted_p = true;
			continue;
		}
		log_warn("tcp", NULL, "closed a connection without a known token",
			 "got=%zu", guest->got);
		guest_free(guest);
	}
	if (transport->resting) {
		*wanted_p = true;
		transport->resting = loop_fd_set(&transport->watch, LOOP_READ) < 0;
	}
}

/* ---- where it is ---- */

/* "tcp://127.0.0.1:0", "tcp://[::1]:5", "tcp://STAR:0"; false: not a number. */
static bool place_parse(const char *endpoint, union net_place *sa, bool *any_p)
{
	char host[CONFIG_ENDPOINT_BYTES];
	char *begin = host, *colon;
	uint16_t port;

	snprintf(host, sizeof(host), "%s",
		 strncmp(endpoint, "tcp://", 6) == 0 ? endpoint + 6 : endpoint);
	colon = strrchr(host, ':');
	if (!colon)
		return false;
	*colon = '\0';
	port = (uint16_t)strtoul(colon + 1, NULL, 10);
	if (*begin == '[') {
		begin++;
		begin[strcspn(begin, "]")] = '\0';
	}
	memset(sa, 0, sizeof(*sa));
	*any_p = strcmp(begin, "*") == 0;
	if (*any_p || inet_pton(AF_INET, begin, &sa->v4.sin_addr) == 1) {
		sa->v4.sin_family = AF_INET;
		sa->v4.sin_port = htons(port);
		*any_p |= sa->v4.sin_addr.s_addr == htonl(INADDR_ANY);
		return true;
	}
	if (inet_pton(AF_INET6, begin, &sa->v6.sin6_addr) != 1)
		return false;
	sa->v6.sin6_family = AF_INET6;
	sa->v6.sin6_port = htons(port);
	*any_p = IN6_IS_ADDR_UNSPECIFIED(&sa->v6.sin6_addr);
	return true;
}

static void set_port(union net_place *sa, in_port_t port)
{
	if (sa->any.sa_family == AF_INET6)
		sa->v6.sin6_port = port;
	else
		sa->v4.sin_port = port;
}

static void add_place(struct tcp_address *address, const union net_place *sa)
{
	if (address->count < TCP_ADDRESSES_MAX)
		address->list[address->count++] = *sa;
}

static void freeifaddrsp(struct ifaddrs **list)
{
	if (*list)
		freeifaddrs(*list);
}

/* Bound to all addresses: tell those of the interfaces that are up; who dials
 * tries one after the other. */
static int places_of_interfaces(struct tcp_address *address, sa_family_t family,
				in_port_t port)
{
	mem_cleanup(freeifaddrsp) struct ifaddrs *list = NULL;
	union net_place sa;

	if (getifaddrs(&list) < 0)
		return err_raise_errno(errno, "tcp: getifaddrs");
	for (struct ifaddrs *i = list; i; i = i->ifa_next) {
		if (!i->ifa_addr || i->ifa_addr->sa_family != family ||
		    !(i->ifa_flags & IFF_UP) || (i->ifa_flags & IFF_LOOPBACK))
			continue;
		memset(&sa, 0, sizeof(sa));
		memcpy(&sa, i->ifa_addr,
		       family == AF_INET6 ? sizeof(sa.v6) : sizeof(sa.v4));
		if (family == AF_INET6 && IN6_IS_ADDR_LINKLOCAL(&sa.v6.sin6_addr))
			continue;
		set_port(&sa, port);
		add_place(address, &sa);
	}
	return 0;
}

static int address_make(struct tcp_transport *transport, const union net_place *bound,
			bool any)
{
	const struct config *config = transport->net.base.env.config;
	in_port_t port = bound->any.sa_family == AF_INET6 ? bound->v6.sin6_port
							  : bound->v4.sin_port;
	struct tcp_address address = {0};
	union net_place sa;
	bool told_any;
	int r = 0;

	if (!any) {
		add_place(&address, bound);
	} else {
		if (*config->advertise &&
		    place_parse(config->advertise, &sa, &told_any) && !told_any) {
			set_port(&sa, port);
			add_place(&address, &sa);
		}
		r = places_of_interfaces(&address, bound->any.sa_family, port);
	}
	if (r == 0 && address.count == 0)
		r = err_raise(ERR_REQUIRE, "tcp: no interface is up: set tcp_listen");
	if (r == 0)
		r = tcp_address_put(&address, transport->net.base.address,
				    &transport->net.base.address_len);
	return err_pass(r);
}

int tcp_port_open(struct tcp_transport *transport)
{
	const struct config *config = transport->net.base.env.config;
	const char *wanted = *config->tcp_listen ? config->tcp_listen : config->listen;
	cleanup_close int fd = -1;
	union net_place sa;
	socklen_t len;
	int one = 1, r;
	bool any;

	if (!place_parse(wanted, &sa, &any))
		return err_raise(ERR_REQUIRE, "tcp: %s is not tcp://ADDRESS:PORT",
				 wanted);
	if (!*config->tcp_listen)
		set_port(&sa, 0); /* listen's is the handshake's */
	fd = socket(sa.any.sa_family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return err_raise_errno(errno, "tcp: socket");
	(void)setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(fd, &sa.any, tcp_sockaddr_len(&sa)) < 0)
		return err_raise_errno(errno, "tcp: bind to %s", wanted);
	if (listen(fd, BACKLOG) < 0)
		return err_raise_errno(errno, "tcp: listen on %s", wanted);
	len = sizeof(sa);
	if (getsockname(fd, &sa.any, &len) < 0)
		return err_raise_errno(errno, "tcp: getsockname");
	r = address_make(transport, &sa, any);
	if (r < 0)
		return err_pass(r);
	loop_fd_init(&transport->watch, transport->net.base.env.loop, fd, on_connection);
	r = loop_fd_set(&transport->watch, LOOP_READ);
	if (r < 0)
		return err_pass(r);
	transport->listen_fd = mem_steal_fd(&fd);
	return 0;
}

void tcp_port_close(struct tcp_transport *transport)
{
	struct tcp_guest *guest;

	while ((guest = list_first(&transport->guests, struct tcp_guest, link)))
		guest_free(guest);
	if (transport->listen_fd >= 0)
		loop_fd_stop(&transport->watch);
	mem_closep(&transport->listen_fd);
}
