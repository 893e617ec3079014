/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The option table, and the files that are written from it. A new option is one
 * row here and one field in struct config; the parser, `config.show`, the
 * sample file and the manual page then know it. Names are unique over all
 * sections, so that a misplaced line can be told where it belongs.
 */
#include <string.h>

#include "daemon/base/mem.h"
#include "daemon/config/config.h"

#define COLUMNS 78u
#define MS UINT64_C(1000000)
#define S UINT64_C(1000000000)
#define KIB UINT64_C(1024)
#define MIB (KIB << 10)
#define GIB (KIB << 20)
#define THREADS_MAX 256
#define SESSION_REGIONS_MOST 4096 /* as many as one REGISTER names */

static const char *const level_words[] = {"error", "warn",  "info",
					  "debug", "trace", NULL};
/* as enum tcp_verify */
static const char *const verify_words[] = {"none", "crc32c", "xxh3", NULL};
/* as enum tcp_crypto, whose end is auto */
static const char *const crypto_words[] = {"none", "aes128gcm", "auto", NULL};
/* as enum log_rooms */
static const char *const rooms_words[] = {"failed", "slow", "all", NULL};
/* as enum groups_trust */
static const char *const trust_words[] = {"listed", "directory", NULL};
/* as enum log_format */
static const char *const format_words[] = {"journal", "plain", "auto", NULL};

#define FIELD(member)                              \
	.offset = offsetof(struct config, member), \
	.size = sizeof(((struct config *)NULL)->member)

static const struct setting options[] = {
	{"daemon", "name", SETTING_TEXT, FIELD(name), .preset = "kvd",
	 .help = "Name of this instance: letters, digits, '.', '_' and '-'. It names the "
		 "socket and the lock in run_dir; a second daemon of the same name is "
		 "refused. --name and KVD_NAME override it."},
	{"daemon", "run_dir", SETTING_PATH, FIELD(run_dir), .preset = "/run/kvd",
	 .help = "Directory of the socket and the lock. It must exist."},
	{"daemon", "log_level", SETTING_ENUM, FIELD(log_level), .preset = "info",
	 .words = level_words, .reload = true,
	 .help = "What is logged. debug grows with objects, trace with chunks."},
	{"daemon", "log_format", SETTING_ENUM, FIELD(log_format), .preset = "auto",
	 .words = format_words, .reload = true,
	 .help = "Lines on stderr: with the journal's priority prefix, or plain with the "
		 "local time and the level. auto: journal where stderr is the journal's "
		 "(JOURNAL_STREAM), else plain."},
	{"daemon", "log_rooms", SETTING_ENUM, FIELD(log_rooms), .preset = "failed",
	 .words = rooms_words, .reload = true,
	 .help = "Which rooms' ends are a line of the log, with bytes, time, transport: "
		 "those that failed, also those that took longer than a second, or all. "
		 "The others' are at debug."},
	{"daemon", "core_dumps", SETTING_BOOL, FIELD(core_dumps), .preset = "no",
	 .help = "Let the kernel write a core when the daemon crashes, and its user look "
		 "into it with a debugger. A core has keys and engines' caches in it."},
	{"daemon", "sandbox", SETTING_BOOL, FIELD(sandbox), .preset = "yes",
	 .help = "Give up the system calls that the daemon does not need once all is "
		 "loaded (seccomp), and the right to change files elsewhere (Landlock), "
		 "as far as the kernel can. no: for a driver or a library that needs one "
		 "of them; the kernel's log names the call (type=1326). `health` says "
		 "what is in force."},
	{"daemon", "offload_threads", SETTING_AUTO_COUNT, FIELD(offload_threads),
	 .preset = "auto", .min = 1, .max = THREADS_MAX,
	 .help = "Helper threads for what blocks: registration, mapping, DNS, long JSON. "
		 "auto: half the cores, 2 to 8."},
	{"daemon", "drain_timeout", SETTING_DURATION, FIELD(drain_timeout_ns),
	 .preset = "30 s", .min = 10 * MS, .max = 3600 * S, .reload = true,
	 .help = "After SIGTERM running rooms may end for so long, then they are "
		 "aborted."},

	{"daemon", "memory", SETTING_SIZE, FIELD(memory_bytes), .preset = "0 B",
	 .max = UINT64_C(1) << 60, .reload = true,
	 .help = "Most memory of its own that the daemon keeps for engines and other "
		 "daemons, all together: lists, plans, pages, layouts, early requests, "
		 "page tables, status pages, what waits to be read; not the engines' "
		 "memory itself. A principal (a user, or "
		 "another daemon's key or address) may have seven eighths; the last "
		 "eighth is for those with less than a 256th. What is over it is "
		 "refused: ELIMIT. 0: a sixteenth of the machine's memory, or of the "
		 "control group's limit where that is less; 256 MiB to 8 GiB. Keep "
		 "it below half of the service's MemoryMax=."},

	{"control", "socket_path", SETTING_PATH, FIELD(socket_path), .preset = "",
	 .help = "Control socket. Empty: <name>.sock in run_dir."},
	{"control", "socket_mode", SETTING_MODE, FIELD(socket_mode), .preset = "0660",
	 .min = 0600, .max = 0777, .help = "Mode of the control socket."},
	{"control", "socket_group", SETTING_TEXT, FIELD(socket_group), .preset = "",
	 .help = "Group of the control socket, by name or number; an access list (ACL) "
		 "where the daemon's user is no member. Empty: the daemon's."},
	{"control", "allow_uids", SETTING_UIDS, FIELD(allow_uids), .preset = "",
	 .reload = true,
	 .help = "Users that may connect, besides root and the daemon's own. With this "
		 "and allow_gids empty: whom the socket's mode lets in."},
	{"control", "allow_gids", SETTING_GIDS, FIELD(allow_gids), .preset = "",
	 .reload = true, .help = "Groups whose members may connect."},
	{"control", "admin_uids", SETTING_UIDS, FIELD(admin_uids), .preset = "",
	 .reload = true,
	 .help = "Users that may drain, shut down, change the log level and touch "
		 "foreign rooms, besides root and the daemon's own."},
	{"control", "sessions", SETTING_COUNT, FIELD(sessions_max), .preset = "256",
	 .min = 1, .max = 65536,
	 .help = "Most sessions at a time. Of 256 and more, here and in rooms and "
		 "orphans, the last eighth is kept for a user, or a peer's key or "
		 "address, that has less than a 256th. Of 16 sessions and more, a "
		 "sixteenth is for administrators."},
	{"control", "session_regions", SETTING_COUNT, FIELD(session_regions_max),
	 .preset = "1024", .min = 1, .max = SESSION_REGIONS_MOST,
	 .help = "Most memory regions of one session."},
	{"control", "session_pools", SETTING_COUNT, FIELD(session_pools_max),
	 .preset = "64", .min = 1, .max = 65536, .help = "Most pools of one session."},
	{"control", "client_queue", SETTING_SIZE, FIELD(client_queue_bytes),
	 .preset = "8 MiB", .min = MIB, .max = GIB,
	 .help = "Replies that may wait for a client that reads late. Past half of it no "
		 "more of its requests are taken, past it the client is closed."},

	{"peer", "listen", SETTING_TEXT, FIELD(listen), .preset = "tcp://127.0.0.1:0",
	 .help = "Where other daemons reach this one: tcp://ADDRESS:PORT with a numeric "
		 "address (IPv6 in brackets, * for all); port 0 takes a free one."},
	{"peer", "advertise", SETTING_TEXT, FIELD(advertise), .preset = "",
	 .help = "Endpoint told to others, tcp://HOST:PORT, when it is not that of "
		 "listen; port 0 stands for the port in use."},
	{"peer", "keys_dir", SETTING_PATH, FIELD(keys_dir), .preset = "",
	 .help = "Directory of this user where the daemon makes its CURVE key pair at "
		 "the first start (NAME.key, NAME.pub), and where daemons of this user "
		 "with the same keys_dir find each other's. Empty: systemd's "
		 "StateDirectory, else keys-UID in run_dir; they find each other by "
		 "keys-UID in run_dir and by /dev/shm/kvd-keys-UID, without a line in "
		 "curve_allow_file."},
	{"peer", "curve_secret_file", SETTING_PATH, FIELD(curve_secret_file),
	 .preset = "",
	 .help = "File with a CURVE secret key made by hand (kvd-ctl keygen), not "
		 "readable by others. keys_dir is not used then: all daemons that may "
		 "connect are in curve_allow_file. Empty: the key in keys_dir."},
	{"peer", "curve_allow_file", SETTING_PATH, FIELD(curve_allow_file), .preset = "",
	 .reload = true,
	 .help = "File with the daemons of other hosts and users that may connect, a "
		 "line each: NAME KEY [HOST[:PORT]]… (kvd-ctl keys prints it there). A "
		 "line with hosts is for these only. Read again on SIGHUP: peerings of "
		 "keys that were removed, or have another name or other hosts, end."},
	{"peer", "insecure", SETTING_BOOL, FIELD(insecure), .preset = "no",
	 .help = "Without curve_secret_file: no keys; whoever reaches the ports is a "
		 "peer, every user of this host among them. It also allows UCX workers, "
		 "which authenticate nobody, beyond loopback. health, doctor, the log "
		 "and the metrics repeat it."},
	{"peer", "peers", SETTING_COUNT, FIELD(peers_max), .preset = "1024", .min = 1,
	 .max = 65536, .help = "Most remote daemons at a time."},
	{"peer", "message", SETTING_SIZE, FIELD(peer_message_bytes), .preset = "1 MiB",
	 .min = 64 * KIB, .max = 64 * MIB, .help = "Largest message of a peer."},
	{"peer", "ping", SETTING_DURATION, FIELD(ping_interval_ns), .preset = "200 ms",
	 .min = 5 * MS, .max = 60 * S, .reload = true,
	 .help = "Interval of liveness checks, also the daemon's heartbeat."},
	{"peer", "dead_after", SETTING_DURATION, FIELD(dead_after_ns), .preset = "800 ms",
	 .min = 20 * MS, .max = 600 * S, .reload = true,
	 .help = "Silence after which a peer is declared dead, at least twice ping. Time "
		 "in which this daemon itself was late does not count. Engines that "
		 "connect take this daemon for frozen after as much, at least 800 ms."},
	{"peer", "connect_timeout", SETTING_DURATION, FIELD(connect_timeout_ns),
	 .preset = "10 s", .min = 10 * MS, .max = 3600 * S, .reload = true,
	 .help = "A room or transfer whose peer is not connected, by its data port, too, "
		 "fails after this, with the reason; after dead_after, when it was "
		 "connected and went away. The peer is tried as long as something "
		 "waits for it."},
	{"peer", "orphans", SETTING_COUNT, FIELD(orphans_max), .preset = "4096", .min = 1,
	 .max = 1 << 20,
	 .help = "Most room requests of peers kept for a sender that does not exist "
		 "yet; and, apart from them, as many words of receivers that could not "
		 "start."},
	{"peer", "orphan_ttl", SETTING_DURATION, FIELD(orphan_ttl_ns), .preset = "60 s",
	 .min = 10 * MS, .max = 3600 * S, .reload = true,
	 .help = "How long these are kept."},

	{"cluster", "cluster", SETTING_TEXT, FIELD(cluster), .preset = "",
	 .module = "cluster",
	 .help = "Where this daemon finds the members of the cluster. file:/PATH: a line "
		 "for each of their ranks, GROUP WORKER TP.PP.DP.CP ENDPOINT#KEY, behind "
		 "it pool=NAME, model=NAME, url=URL, engine=WORD and "
		 "bootstrap=HOST:PORT where they have one; '-' is a group's only worker; "
		 "the lines are taken anew on SIGHUP. "
		 "etcd://HOST:PORT[,HOST:PORT]…/PREFIX, etcds:// by TLS: what they "
		 "publish there. Empty: this daemon's own engines only."},
	{"cluster", "cluster_trust", SETTING_ENUM, FIELD(cluster_trust),
	 .preset = "listed", .words = trust_words, .module = "cluster",
	 .help = "Whose keys may connect. listed: those in curve_allow_file, whatever "
		 "the directory says. directory: also those that daemons publish in "
		 "etcd; whoever can write there lets daemons in."},
	{"cluster", "cluster_lease", SETTING_DURATION, FIELD(cluster_lease_ns),
	 .preset = "15 s", .min = 1 * S, .max = 600 * S, .module = "cluster",
	 .help = "How long the directory keeps this daemon's entries when it does not "
		 "hear of it."},
	{"cluster", "cluster_tls_ca", SETTING_PATH, FIELD(cluster_tls_ca), .preset = "",
	 .module = "cluster",
	 .help = "etcd by TLS: file of the authorities (PEM) that its certificate is "
		 "checked with. etcds:// needs it."},
	{"cluster", "cluster_tls_cert", SETTING_PATH, FIELD(cluster_tls_cert),
	 .preset = "", .module = "cluster",
	 .help = "etcd by TLS: this daemon's certificate (PEM), if it asks "
		 "for one."},
	{"cluster", "cluster_tls_key", SETTING_PATH, FIELD(cluster_tls_key), .preset = "",
	 .module = "cluster",
	 .help = "The key of cluster_tls_cert (PEM), not readable by others."},
	{"cluster", "cluster_user_file", SETTING_PATH, FIELD(cluster_user_file),
	 .preset = "", .module = "cluster",
	 .help = "etcd with users: file with USER:PASSWORD on a line of its own, not "
		 "readable by others."},

	{"metrics", "metrics_listen", SETTING_TEXT, FIELD(metrics_listen), .preset = "",
	 .help = "Where Prometheus and people read the figures, by HTTP: "
		 "tcp://127.0.0.1:9464, or unix:/run/kvd/NAME.metrics with the group and "
		 "mode of the control socket. Nobody is authenticated, so only loopback "
		 "addresses and Unix sockets are allowed. Empty: nowhere."},

	{"rooms", "rooms", SETTING_COUNT, FIELD(rooms_max), .preset = "65536", .min = 1,
	 .max = 1 << 24, .help = "Most rooms at a time."},
	{"rooms", "tombstones", SETTING_COUNT, FIELD(tombstones_max), .preset = "65536",
	 .min = 16, .max = 1 << 24,
	 .help = "Closed rooms remembered to answer late messages."},
	{"rooms", "bootstrap_timeout", SETTING_DURATION, FIELD(bootstrap_timeout_ns),
	 .preset = "300 s", .min = 10 * MS, .max = 86400 * S, .reload = true,
	 .help = "A room whose other side does not show up fails after this."},
	{"rooms", "waiting_timeout", SETTING_DURATION, FIELD(waiting_timeout_ns),
	 .preset = "300 s", .min = 10 * MS, .max = 86400 * S, .reload = true,
	 .help = "A room that waits for its engine's first chunk fails after this."},
	{"rooms", "transfer_stall_timeout", SETTING_DURATION,
	 FIELD(transfer_stall_timeout_ns), .preset = "10 s", .min = 10 * MS,
	 .max = 3600 * S, .reload = true,
	 .help = "A room with transfers posted in which no byte moves for so long "
		 "fails."},
	{"rooms", "fence_timeout", SETTING_DURATION, FIELD(fence_timeout_ns),
	 .preset = "5 s", .min = 10 * MS, .max = 600 * S, .reload = true,
	 .help = "A fence that is not proven by then is forced: the peer's connection is "
		 "torn down."},
	{"rooms", "lease", SETTING_DURATION, FIELD(lease_ns), .preset = "30 s",
	 .min = 100 * MS, .max = 86400 * S, .reload = true,
	 .help = "An offer's lease when room.open does not name one."},

	{"chunks", "chunk_memory", SETTING_SIZE, FIELD(chunk_memory_bytes),
	 .preset = "0 B", .max = UINT64_C(1) << 40, .module = "store",
	 .help = "Memory of the daemon's own in which chunks of KV are kept that engines "
		 "name and share (chunk.space in the reference); they outlive their "
		 "engine. It is made and registered at the start, and counts for the "
		 "service's MemoryMax=. A part of a chunk may take a 128th of it. Any "
		 "peer daemon can read it. 0: none."},
	{"chunks", "chunk_dir", SETTING_PATH, FIELD(chunk_dir), .preset = "",
	 .module = "store",
	 .help = "Directory in which chunks are kept, too, that were asked for again, or "
		 "are to last: they outlive the daemon. It must exist, belong to the "
		 "daemon's user with mode 0700, and be this daemon's alone, on a file "
		 "system of a local disk. Empty: none."},
	{"chunks", "chunk_dir_size", SETTING_SIZE, FIELD(chunk_dir_bytes),
	 .preset = "64 GiB", .min = MIB, .max = UINT64_C(1) << 50, .module = "store",
	 .help = "Most bytes of files in chunk_dir, made as they are needed, in 128 "
		 "pieces. With another size than before its files are given up."},
	{"chunks", "attend_threads", SETTING_COUNT, FIELD(attend_threads), .preset = "0",
	 .min = 0, .max = THREADS_MAX, .module = "attend",
	 .help = "Threads that attend to chunks here for engines of this daemon and of "
		 "others (attend.open): so many cores, at most, are taken from the "
		 "engines of this host. 0: query rows are refused, chunks are fetched."},
	{"chunks", "attend_isa", SETTING_TEXT, FIELD(attend_isa), .preset = "auto",
	 .module = "attend",
	 .help = "Instructions that those threads use: auto (the most that the processor "
		 "has), ref, vector, avx2, avx512 or amx. kvd-ctl status shows which."},
	{"chunks", "attend_spin", SETTING_AUTO_COUNT, FIELD(attend_spin_us),
	 .preset = "auto", .min = 1, .max = 100000, .module = "attend",
	 .help = "Microseconds for which the daemon goes on looking for messages after "
		 "it sent or answered query rows, instead of sleeping: a core is busy "
		 "meanwhile, and each round trip is shorter by what waking takes. 1: it "
		 "sleeps. auto: 200 with 4 cores or more, else 1."},
	{"chunks", "chunk_stores", SETTING_TEXT, FIELD(chunk_stores), .preset = "",
	 .module = "store",
	 .help = "Daemons that are asked for chunks that this one has not: at most 16 "
		 "endpoints, with blanks between them, dialled at the start. A daemon "
		 "with chunk_memory answers any peer that it admits."},
	{"chunks", "chunk_hedge", SETTING_BOOL, FIELD(chunk_hedge), .preset = "yes",
	 .module = "store",
	 .help = "What a fetch waits for longer than three times what its daemon has "
		 "taken lately (95th percentile) is pulled from the other daemon that "
		 "holds it into chunk_memory, and used if it is there first: one leg of "
		 "20, at most."},
	{"chunks", "chunk_homes", SETTING_TEXT, FIELD(chunk_homes), .preset = "",
	 .module = "store",
	 .help = "Daemons that keep the directory of who has which chunks: at most 32 "
		 "endpoints, with blanks between them, the same words at all daemons; "
		 "this one may be among them. They are told what this daemon has, and "
		 "asked for what it has not. Each needs chunk_memory. cluster: those "
		 "that have this word, too, as etcd says (option cluster)."},
	{"chunks", "chunk_home_memory", SETTING_SIZE, FIELD(chunk_home_bytes),
	 .preset = "16 MiB", .max = UINT64_C(64) << 30, .module = "store",
	 .help = "Most memory for the directory when this daemon is one of others' "
		 "chunk_homes: 21 bytes for a chunk of a daemon. It is taken as it is "
		 "used. 0: it keeps none."},

	{"transport", "transports", SETTING_WORDS, FIELD(transports), .preset = "auto",
	 .help = "Ways to move bytes, in order of preference: local, shm, verbs, tcp, "
		 "ucx. "
		 "auto: all that are built in and allowed by listen, in this order."},
	{"transport", "require", SETTING_WORDS, FIELD(require), .preset = "",
	 .help = "Only these transports, or the class rdma, may be used; a pair of "
		 "daemons without one fails loudly. Empty: any."},
	{"transport", "ucx_library", SETTING_PATH, FIELD(ucx_library), .preset = "",
	 .help = "libucp to load. Empty: libucp.so.0 of the system. Its devices: "
		 "UCX_NET_DEVICES of the daemon's environment, or the one of listen; "
		 "transports: UCX_TLS, or rc, dc and ud on RDMA devices, else tcp."},
	{"transport", "tcp_listen", SETTING_TEXT, FIELD(tcp_listen), .preset = "",
	 .help = "Data port of the tcp transport: tcp://ADDRESS:PORT as in listen. "
		 "Empty: the address of listen and a free port. tcp_crypto "
		 "says what protects its bytes."},
	{"transport", "tcp_streams", SETTING_AUTO_COUNT, FIELD(tcp_streams),
	 .preset = "auto", .min = 1, .max = 32,
	 .help = "Connections for bytes to each peer; the smaller of both sides' counts. "
		 "auto: half the cores, 1 to 8."},
	{"transport", "tcp_threads", SETTING_AUTO_COUNT, FIELD(tcp_threads),
	 .preset = "auto", .min = 1, .max = THREADS_MAX,
	 .help = "Threads that serve these connections. auto: half the cores, 1 to 8."},
	{"transport", "tcp_verify", SETTING_ENUM, FIELD(tcp_verify), .preset = "none",
	 .words = verify_words,
	 .help = "Checksum of every frame of bytes over tcp, when either side wants one: "
		 "crc32c or xxh3. TCP's own has 16 bits."},
	{"transport", "tcp_crypto", SETTING_ENUM, FIELD(tcp_crypto), .preset = "auto",
	 .words = crypto_words,
	 .help = "What protects tcp's connections: aes128gcm (nobody reads or changes "
		 "their bytes), none. The stronger of what both daemons want holds. "
		 "auto: aes128gcm, but none between loopback addresses. Instead of "
		 "tcp_verify's checksums."},
	{"transport", "verbs_rails", SETTING_TEXT, FIELD(verbs_rails), .preset = "",
	 .help = "RDMA ports for verbs, in order: device, device:port, interface or "
		 "address. Empty: the one that has the address of listen; all, where "
		 "that is a wildcard."},
	{"transport", "verbs_ack_timeout", SETTING_COUNT, FIELD(verbs_ack_timeout),
	 .preset = "14", .min = 8, .max = 22,
	 .help = "An adapter sends again what was not acknowledged after 4.096 us << "
		 "this (14: 67 ms)."},
	{"transport", "verbs_traffic_class", SETTING_COUNT, FIELD(verbs_traffic_class),
	 .preset = "0", .min = 0, .max = 255,
	 .help = "Traffic class (DSCP and ECN bits) of RoCE packets; the service level "
		 "follows from it, by the port's priority map (RoCE) or the subnet "
		 "manager's QoS classes (InfiniBand). 0: the system's."},
	{"transport", "verbs_request_ns", SETTING_AUTO_COUNT, FIELD(verbs_request_ns),
	 .preset = "auto", .min = 1, .max = 1000000,
	 .help = "What a work request costs, in ns: rows that are scattered at both ends "
		 "and cheaper to copy twice are packed. auto: measured with each peer, "
		 "again and again from the first such transfer on. 1: never packed."},
	{"transport", "copy_threads", SETTING_AUTO_COUNT, FIELD(copy_threads),
	 .preset = "auto", .min = 1, .max = THREADS_MAX,
	 .help = "Threads that copy engine memory. auto: half the cores, 1 to 8."},
	{"transport", "host_copy_threads", SETTING_AUTO_COUNT, FIELD(host_copy_threads),
	 .preset = "auto", .min = 1, .max = THREADS_MAX,
	 .help = "Copy threads that all daemons of one run_dir may run at once; each may "
		 "always run one. The same for all of them. auto: half the cores, at "
		 "least copy_threads."},
	{"transport", "vm_direct", SETTING_BOOL, FIELD(vm_direct), .preset = "yes",
	 .help = "Read private memory (vm) of engines that another daemon of this host "
		 "serves, where it lies: only processes that the other daemon's user "
		 "owns, and where the kernel allows it. Else, and with no, both daemons "
		 "copy through a ring."},
	{"transport", "gpu", SETTING_TEXT, FIELD(gpu), .preset = "auto",
	 .help = "GPUs whose memory engines may hand over: auto (all that are here), "
		 "off, or UUIDs and PCI ids. No driver is loaded before the first does."},
	{"transport", "cuda_library", SETTING_TEXT, FIELD(cuda_library),
	 .preset = "libcuda.so.1",
	 .help = "The CUDA driver's library: a name or a path."},
	{"transport", "gpu_kernels", SETTING_TEXT, FIELD(gpu_kernels), .preset = "auto",
	 .help = "Code for GPUs: auto (what this kvd was built with), off, or the path "
		 "of an image that nvcc made of gpu/kernels.cu. Without it the copy "
		 "engines move everything."},
	{"transport", "slice", SETTING_SIZE, FIELD(slice_bytes), .preset = "512 KiB",
	 .min = 4 * KIB, .max = 64 * MIB,
	 .help = "Bytes a copy thread moves before it looks for a cancel."},
	{"transport", "max_inflight", SETTING_SIZE, FIELD(max_inflight_bytes),
	 .preset = "256 MiB", .min = 64 * KIB, .max = 1024 * GIB, .reload = true,
	 .help = "Bytes posted to one peer and not yet done, past which a room or "
		 "session has one operation under way there at a time."},
};

const struct setting *config_settings(size_t *count_p)
{
	*count_p = ARRAY_LEN(options);
	return options;
}

/* `text` filled to lines of COLUMNS, each begun with `lead`. */
static void print_filled(FILE *out, const char *lead, const char *text)
{
	size_t column = 0;

	while (*text) {
		size_t len = strcspn(text, " ");

		if (column && column + 1 + len > COLUMNS) {
			fputc('\n', out);
			column = 0;
		}
		if (!column)
			column = (size_t)fprintf(out, "%s", lead);
		column += (size_t)fprintf(out, " %.*s", (int)len, text);
		text += len;
		text += strspn(text, " ");
	}
	fputc('\n', out);
}

void config_print_sample(FILE *out)
{
	const char *section = "";
	char range[SETTING_TEXT_MAX];
	const struct setting *row;
	size_t count;

	row = config_settings(&count);
	fputs("# SPDX-License-Identifier: Apache-2.0\n"
	      "# kvd.conf: written by `kvd --print-config`; every line shows its "
	      "default.\n"
	      "# kvd --check-config --config FILE tells what is wrong with a file.\n"
	      "#\n"
	      "# What two hosts need first, here on 10.0.0.2. The list has the line of\n"
	      "# each daemon elsewhere, as kvd-ctl keys prints it there.\n"
	      "#\n"
	      "#   [peer]\n"
	      "#   listen = tcp://10.0.0.2:7400\n"
	      "#   curve_allow_file = /etc/kvd/peers\n"
	      "#   [cluster]\n"
	      "#   cluster = file:/etc/kvd/members   where engines are named by group\n"
	      "#   [transport]\n"
	      "#   tcp_listen = tcp://10.0.0.2:7401\n"
	      "#   require = rdma              where nothing slower shall do\n",
	      out);
	for (; count; count--, row++) {
		if (strcmp(section, row->section) != 0) {
			section = row->section;
			fprintf(out, "\n[%s]\n", section);
		}
		setting_range(row, range);
		fputc('\n', out);
		print_filled(out, "#", row->help);
		fprintf(out, "# Allowed: %s.%s\n", range,
			row->reload ? " Taken anew on SIGHUP." : "");
		fprintf(out, "#%s =%s%s\n", row->name, *row->preset ? " " : "",
			row->preset);
	}
}

/* In front of a value: where it comes from, and what stands for it in the table. */
static void print_origin(const struct config *config, uint32_t line,
			 const struct setting *row, FILE *out)
{
	static struct config presets;

	if (line == CONFIG_LINE_ARGUMENT)
		fputs("# --name or KVD_NAME\n", out);
	else if (line != CONFIG_LINE_DEFAULT)
		fprintf(out, "# %s:%u\n", config->path, line);
	else if (setting_parse(row, row->preset, &presets) == 0 &&
		 setting_equal(row, config, &presets))
		fputs("# default\n", out);
	else
		fprintf(out, "# default: %s\n", *row->preset ? row->preset : "(empty)");
}

void config_print_effective(const struct config *config, FILE *out)
{
	const char *section = "";
	char value[SETTING_TEXT_MAX];
	const struct setting *row;
	size_t count;

	row = config_settings(&count);
	for (size_t i = 0; i < count; i++, row++) {
		if (strcmp(section, row->section) != 0) {
			fprintf(out, "%s[%s]\n", *section ? "\n" : "", row->section);
			section = row->section;
		}
		setting_format(row, config, value);
		print_origin(config, config->line[i], row, out);
		fprintf(out, "%s =%s%s\n", row->name, *value ? " " : "", value);
	}
}

/* Roff takes a '.' or '\'' in column one and every backslash for itself. */
static void print_roff(FILE *out, const char *text)
{
	if (*text == '.' || *text == '\'')
		fputs("\\&", out);
	for (; *text; text++) {
		if (*text == '\\')
			fputs("\\e", out);
		else if (*text == '-')
			fputs("\\-", out);
		else
			fputc(*text, out);
	}
}

void config_print_man(FILE *out)
{
	const char *section = "";
	char range[SETTING_TEXT_MAX];
	const struct setting *row;
	size_t count;

	row = config_settings(&count);
	for (; count; count--, row++) {
		if (strcmp(section, row->section) != 0) {
			section = row->section;
			fprintf(out, ".SS [%s]\n", section);
		}
		setting_range(row, range);
		fprintf(out, ".TP\n.B ");
		print_roff(out, row->name);
		fprintf(out, "\n");
		print_roff(out, row->help);
		fprintf(out, "\nDefault: \\fB");
		print_roff(out, *row->preset ? row->preset : "(empty)");
		fprintf(out, "\\fR. Allowed: ");
		print_roff(out, range);
		fprintf(out, ".%s\n", row->reload ? " Reloadable." : "");
	}
}
