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
	 .help = "Name of this instance: letters, digits, '.', '_' and '-'. The "
		 "socket and the lock file in run_dir have this name; a second daemon "
		 "with the same name does not start. --name and KVD_NAME override the "
		 "option."},
	{"daemon", "run_dir", SETTING_PATH, FIELD(run_dir), .preset = "/run/kvd",
	 .help = "Directory of the socket and the lock file. It must exist."},
	{"daemon", "log_level", SETTING_ENUM, FIELD(log_level), .preset = "info",
	 .words = level_words, .reload = true,
	 .help = "Least severe level that is logged. The volume of debug grows with "
		 "rooms and peers, the volume of trace with chunks and messages."},
	{"daemon", "log_format", SETTING_ENUM, FIELD(log_format), .preset = "auto",
	 .words = format_words, .reload = true,
	 .help = "Format of lines on stderr. journal: with the priority prefix of the "
		 "systemd journal. plain: with local time and level. auto: journal if "
		 "stderr is connected to the journal (JOURNAL_STREAM), else plain."},
	{"daemon", "log_rooms", SETTING_ENUM, FIELD(log_rooms), .preset = "failed",
	 .words = rooms_words, .reload = true,
	 .help = "Rooms whose end is logged, with bytes, duration and transport: "
		 "failed rooms only; slow: also rooms that took longer than a second; "
		 "or all. Other rooms are logged at level debug."},
	{"daemon", "core_dumps", SETTING_BOOL, FIELD(core_dumps), .preset = "no",
	 .help = "Allow a core dump after a crash, and a debugger of the daemon's "
		 "user. A core dump contains keys and cached data of engines."},
	{"daemon", "sandbox", SETTING_BOOL, FIELD(sandbox), .preset = "yes",
	 .help = "After startup, give up unneeded system calls (seccomp) and write "
		 "access to other files (Landlock), as far as the kernel supports it. "
		 "Set no if a driver or library needs a blocked call; the kernel log "
		 "names the call (type=1326). `health` reports the restrictions in "
		 "force."},
	{"daemon", "offload_threads", SETTING_COUNT, FIELD(offload_threads),
	 .preset = "auto", .zero = "auto", .min = 1, .max = THREADS_MAX,
	 .help = "Helper threads for blocking work: memory registration, mapping, "
		 "DNS, long JSON requests. auto: half the cores, from 2 to 8."},
	{"daemon", "drain_timeout", SETTING_DURATION, FIELD(drain_timeout_ns),
	 .preset = "30 s", .min = 10 * MS, .max = 3600 * S, .reload = true,
	 .help = "Time that running rooms have to finish after SIGTERM, before they "
		 "are aborted."},

	{"daemon", "memory_limit", SETTING_SIZE, FIELD(memory_bytes), .preset = "auto",
	 .zero = "auto", .min = 1, .max = UINT64_C(1) << 60, .reload = true,
	 .help = "Limit of the daemon's own memory for engines and other daemons "
		 "together: lists, plans, pages, layouts, early requests, page "
		 "tables, status pages and receive buffers. Engines' cache memory is "
		 "not counted. One principal (a user, or the key or address of "
		 "another daemon) can use at most seven eighths; the last eighth is "
		 "reserved for principals with less than a 256th. Requests over the "
		 "limit fail with ELIMIT. auto: a sixteenth of the machine's memory, "
		 "or of the control group's limit if that is smaller, from 256 MiB to "
		 "8 GiB. Keep the limit below half of the service's MemoryMax=."},

	{"control", "socket_path", SETTING_PATH, FIELD(socket_path), .preset = "",
	 .help = "Path of the control socket. Empty: NAME.sock in run_dir."},
	{"control", "socket_mode", SETTING_MODE, FIELD(socket_mode), .preset = "0660",
	 .min = 0600, .max = 0777, .help = "Access mode of the control socket."},
	{"control", "socket_group", SETTING_TEXT, FIELD(socket_group), .preset = "",
	 .help = "Group of the control socket, by name or number. If the daemon's "
		 "user is not a member of the group, an access control list (ACL) is "
		 "set. Empty: the daemon's group."},
	{"control", "allow_uids", SETTING_UIDS, FIELD(allow_uids), .preset = "",
	 .reload = true,
	 .help = "Users that may connect, in addition to root and the daemon's own "
		 "user. If this and allow_gids are empty, the socket's mode decides."},
	{"control", "allow_gids", SETTING_GIDS, FIELD(allow_gids), .preset = "",
	 .reload = true, .help = "Groups whose members may connect."},
	{"control", "admin_uids", SETTING_UIDS, FIELD(admin_uids), .preset = "",
	 .reload = true,
	 .help = "Users that may drain and stop the daemon, change the log level and "
		 "access other users' rooms, in addition to root and the daemon's own "
		 "user."},
	{"control", "sessions", SETTING_COUNT, FIELD(sessions_max), .preset = "256",
	 .min = 1, .max = 65536,
	 .help = "Limit of concurrent sessions. If this limit, rooms or "
		 "early_requests is 256 or more, the last eighth is reserved for "
		 "principals (a user, or the key or address of another daemon) with "
		 "less than a 256th. Of 16 or more sessions, a sixteenth is reserved "
		 "for administrators."},
	{"control", "session_regions", SETTING_COUNT, FIELD(session_regions_max),
	 .preset = "1024", .min = 1, .max = SESSION_REGIONS_MOST,
	 .help = "Limit of memory regions per session."},
	{"control", "session_pools", SETTING_COUNT, FIELD(session_pools_max),
	 .preset = "64", .min = 1, .max = 65536, .help = "Limit of pools per session."},
	{"control", "client_queue", SETTING_SIZE, FIELD(client_queue_bytes),
	 .preset = "8 MiB", .min = MIB, .max = GIB,
	 .help = "Limit of unread replies per client. The daemon stops reading a "
		 "client's requests at half of the limit, and closes the connection "
		 "at the limit."},

	{"peer", "listen", SETTING_TEXT, FIELD(listen), .preset = "tcp://127.0.0.1:0",
	 .help = "Address for connections from other daemons: tcp://ADDRESS:PORT with "
		 "a numeric address (IPv6 in brackets, * for all addresses). Port 0 "
		 "selects a free port."},
	{"peer", "advertise", SETTING_TEXT, FIELD(advertise), .preset = "",
	 .help = "Endpoint published to other daemons, tcp://HOST:PORT, if it differs "
		 "from listen. Port 0 stands for the port in use."},
	{"peer", "keys_dir", SETTING_PATH, FIELD(keys_dir), .preset = "",
	 .help = "Directory of the CURVE key pair that the daemon creates at its "
		 "first start (NAME.key, NAME.pub). Daemons of one user with the same "
		 "keys_dir trust each other. Empty: systemd's StateDirectory, else "
		 "keys-UID in run_dir; daemons of one user then find each other by "
		 "keys-UID in run_dir and by /dev/shm/kvd-keys-UID, without an entry "
		 "in curve_allow_file."},
	{"peer", "curve_secret_file", SETTING_PATH, FIELD(curve_secret_file),
	 .preset = "",
	 .help = "File with a CURVE secret key from kvd-ctl keygen; it must not be "
		 "readable by others. It replaces keys_dir: every daemon that may "
		 "connect must then be listed in curve_allow_file. Empty: the key in "
		 "keys_dir."},
	{"peer", "curve_allow_file", SETTING_PATH, FIELD(curve_allow_file), .preset = "",
	 .reload = true,
	 .help = "File with the daemons of other hosts and users that may connect, "
		 "one per line: NAME KEY [HOST[:PORT]]... (kvd-ctl keys prints the "
		 "line on the other host). A line with hosts is valid for these hosts "
		 "only. The file is read again on SIGHUP; connections of keys that "
		 "were removed, or now have another name or other hosts, are closed."},
	{"peer", "insecure", SETTING_BOOL, FIELD(insecure), .preset = "no",
	 .help = "Without curve_secret_file: use no keys. Any process that reaches "
		 "the ports is accepted as a peer, including every local user. It "
		 "also allows UCX workers, which have no authentication, on addresses "
		 "other than loopback. health, doctor, the log and the metrics report "
		 "it."},
	{"peer", "peers", SETTING_COUNT, FIELD(peers_max), .preset = "1024", .min = 1,
	 .max = 65536, .help = "Limit of remote daemons."},
	{"peer", "message", SETTING_SIZE, FIELD(peer_message_bytes), .preset = "1 MiB",
	 .min = 64 * KIB, .max = 64 * MIB, .help = "Largest message from a peer."},
	{"peer", "ping", SETTING_DURATION, FIELD(ping_interval_ns), .preset = "200 ms",
	 .min = 5 * MS, .max = 60 * S, .reload = true,
	 .help = "Interval of liveness checks of peers. A peer that answers is checked "
		 "once a second while nothing waits for it and no message passed for a "
		 "second."},
	{"peer", "dead_after", SETTING_DURATION, FIELD(dead_after_ns), .preset = "800 ms",
	 .min = 20 * MS, .max = 600 * S, .reload = true,
	 .help = "A peer that sends nothing for this time is declared dead; at least "
		 "twice ping. Delays of this daemon itself do not count. Connected "
		 "engines treat this daemon as hung after the same time, at least 800 "
		 "ms."},
	{"peer", "connect_timeout", SETTING_DURATION, FIELD(connect_timeout_ns),
	 .preset = "10 s", .min = 10 * MS, .max = 3600 * S, .reload = true,
	 .help = "A room or transfer fails, with the reason, if its peer's control "
		 "and data connections are not up after this time; after dead_after "
		 "if they were up and were lost. The daemon retries the connection as "
		 "long as a room or transfer needs it."},
	{"peer", "early_requests", SETTING_COUNT, FIELD(early_requests_max),
	 .preset = "4096", .min = 1, .max = 1 << 20,
	 .help = "Limit of peers' requests that are kept for rooms that are not open "
		 "yet, and separately of abort notices for such rooms."},
	{"peer", "early_request_ttl", SETTING_DURATION, FIELD(early_request_ttl_ns),
	 .preset = "60 s", .min = 10 * MS, .max = 3600 * S, .reload = true,
	 .help = "Time that early requests are kept."},

	{"cluster", "cluster", SETTING_TEXT, FIELD(cluster), .preset = "",
	 .module = "cluster",
	 .help = "Directory of the cluster's members. file:/PATH: a file with one "
		 "line per rank, GROUP WORKER TP.PP.DP.CP ENDPOINT#KEY, optionally "
		 "followed by pool=NAME, model=NAME, url=URL, engine=WORD and "
		 "bootstrap=HOST:PORT; '-' is the only worker of a group; SIGHUP "
		 "reads the file again. etcd://HOST:PORT[,HOST:PORT].../PREFIX, or "
		 "etcds:// with TLS: the entries that daemons publish there. Empty: "
		 "engines of this daemon only."},
	{"cluster", "cluster_trust", SETTING_ENUM, FIELD(cluster_trust),
	 .preset = "listed", .words = trust_words, .module = "cluster",
	 .help = "Keys that may connect. listed: keys in curve_allow_file only. "
		 "directory: also keys that daemons publish in etcd; write access to "
		 "etcd then grants access to this daemon."},
	{"cluster", "cluster_lease", SETTING_DURATION, FIELD(cluster_lease_ns),
	 .preset = "15 s", .min = 1 * S, .max = 600 * S, .module = "cluster",
	 .help = "Time after which the directory removes this daemon's entries if the "
		 "daemon does not renew them."},
	{"cluster", "cluster_tls_ca", SETTING_PATH, FIELD(cluster_tls_ca), .preset = "",
	 .module = "cluster",
	 .help = "etcd with TLS: file of the certificate authorities (PEM) that "
		 "verify etcd's certificate. Required with etcds://."},
	{"cluster", "cluster_tls_cert", SETTING_PATH, FIELD(cluster_tls_cert),
	 .preset = "", .module = "cluster",
	 .help = "etcd with TLS: client certificate (PEM), if etcd requires one."},
	{"cluster", "cluster_tls_key", SETTING_PATH, FIELD(cluster_tls_key), .preset = "",
	 .module = "cluster",
	 .help = "Key of cluster_tls_cert (PEM); it must not be readable by others."},
	{"cluster", "cluster_user_file", SETTING_PATH, FIELD(cluster_user_file),
	 .preset = "", .module = "cluster",
	 .help = "etcd with authentication: file with one line USER:PASSWORD; it must "
		 "not be readable by others."},

	{"metrics", "metrics_listen", SETTING_TEXT, FIELD(metrics_listen), .preset = "",
	 .help = "Address of the HTTP server for Prometheus and probes: "
		 "tcp://127.0.0.1:9464, or unix:/run/kvd/NAME.metrics with group and "
		 "mode of the control socket. The server has no authentication, so "
		 "only loopback addresses and Unix sockets are allowed. Empty: no "
		 "server."},

	{"rooms", "rooms", SETTING_COUNT, FIELD(rooms_max), .preset = "65536", .min = 1,
	 .max = 1 << 24, .help = "Limit of open rooms."},
	{"rooms", "tombstones", SETTING_COUNT, FIELD(tombstones_max), .preset = "65536",
	 .min = 16, .max = 1 << 24,
	 .help = "Number of closed rooms that are remembered to answer late messages."},
	{"rooms", "bootstrap_timeout", SETTING_DURATION, FIELD(bootstrap_timeout_ns),
	 .preset = "300 s", .min = 10 * MS, .max = 86400 * S, .reload = true,
	 .help = "A room fails if its other side does not open it within this time."},
	{"rooms", "waiting_timeout", SETTING_DURATION, FIELD(waiting_timeout_ns),
	 .preset = "300 s", .min = 10 * MS, .max = 86400 * S, .reload = true,
	 .help = "A room fails if its engine does not send the first chunk within "
		 "this time."},
	{"rooms", "transfer_stall_timeout", SETTING_DURATION,
	 FIELD(transfer_stall_timeout_ns), .preset = "10 s", .min = 10 * MS,
	 .max = 3600 * S, .reload = true,
	 .help = "A room with posted transfers fails if no byte moves for this time."},
	{"rooms", "fence_timeout", SETTING_DURATION, FIELD(fence_timeout_ns),
	 .preset = "5 s", .min = 10 * MS, .max = 600 * S, .reload = true,
	 .help = "If a fence is not confirmed within this time, the daemon closes the "
		 "connection to the peer to enforce it."},
	{"rooms", "offer_lease", SETTING_DURATION, FIELD(lease_ns), .preset = "30 s",
	 .min = 100 * MS, .max = 86400 * S, .reload = true,
	 .help = "Lease of an offer if room.open does not set one."},

	{"chunks", "chunk_memory", SETTING_SIZE, FIELD(chunk_memory_bytes),
	 .preset = "off", .zero = "off", .min = MIB, .max = UINT64_C(1) << 40,
	 .module = "store",
	 .help = "Memory of the daemon for chunks of KV that engines store by name "
		 "and share (space.open in the reference). Chunks survive the engine "
		 "that stored them. The memory is allocated and registered at "
		 "startup, and counts towards the service's MemoryMax=. One part of a "
		 "chunk can use at most a 128th. Every connected peer can read the "
		 "chunks."},
	{"chunks", "chunk_dir", SETTING_PATH, FIELD(chunk_dir), .preset = "",
	 .module = "store",
	 .help = "Directory for files with chunks that were requested again or stored "
		 "as durable; they survive the daemon. It must exist, belong to the "
		 "daemon's user with mode 0700, be on a local disk, and be used by "
		 "this daemon only. Empty: no files."},
	{"chunks", "chunk_dir_size", SETTING_SIZE, FIELD(chunk_dir_bytes),
	 .preset = "64 GiB", .min = MIB, .max = UINT64_C(1) << 50, .module = "store",
	 .help = "Limit of the size of files in chunk_dir. Files are created as "
		 "needed, each a 128th of the limit. A change of the limit discards "
		 "the existing files."},
	{"chunks", "attention_threads", SETTING_COUNT, FIELD(attention_threads),
	 .preset = "off", .zero = "off", .min = 1, .max = THREADS_MAX, .module = "attend",
	 .help = "Threads that compute attention over local chunks for engines of "
		 "this and other daemons (attention.open). They use at most this many "
		 "cores of the host. off: query rows are refused and chunks are "
		 "fetched."},
	{"chunks", "attention_isa", SETTING_TEXT, FIELD(attention_isa), .preset = "auto",
	 .module = "attend",
	 .help = "Instruction set of these threads: auto (the best of the processor), "
		 "ref, vector, avx2, avx512, avx512_bf16 or amx. The last two round "
		 "weights to bf16. kvd-ctl status shows the choice."},
	{"chunks", "attention_gpu_share", SETTING_COUNT, FIELD(attention_gpu_share),
	 .preset = "off", .zero = "off", .min = 1, .max = 100, .module = "attend",
	 .help = "Percent of a GPU's time for attention over chunks that an engine has "
		 "published in its memory (chunk.publish). The kernels have the lowest "
		 "priority and take at most about 200 us each; after one that took t "
		 "the next waits for t * (100 / share - 1). 10 suits a GPU that serves "
		 "an engine. off: query rows for such chunks are refused and the chunks "
		 "are fetched."},
	{"chunks", "attention_busy_poll", SETTING_COUNT, FIELD(attention_busy_poll_us),
	 .preset = "auto", .zero = "auto", .one = "off", .min = 2, .max = 100000,
	 .module = "attend",
	 .help = "Microseconds for which the daemon polls for messages, instead of "
		 "sleeping, after it sent or answered query rows. Each round trip "
		 "saves a wake-up; a core is busy meanwhile. auto: 200 with 4 or more "
		 "cores, else off."},
	{"chunks", "chunk_peers", SETTING_TEXT, FIELD(chunk_peers), .preset = "",
	 .module = "store",
	 .help = "Daemons that are queried for chunks that are not stored here: up to "
		 "16 endpoints, separated by blanks. The daemon connects to them at "
		 "startup. A daemon with chunk_memory answers every connected peer."},
	{"chunks", "chunk_hedge", SETTING_BOOL, FIELD(chunk_hedge), .preset = "yes",
	 .module = "store",
	 .help = "Request a slow part of a fetch from a second holder as well, and "
		 "use the answer that arrives first. A part is slow after three times "
		 "the holder's recent 95th percentile. At most one part of 20 is "
		 "requested twice."},
	{"chunks", "chunk_index", SETTING_TEXT, FIELD(chunk_index), .preset = "",
	 .module = "store",
	 .help = "Index nodes: daemons that keep an index of the chunks of all "
		 "daemons. Up to 32 endpoints, separated by blanks, the same text in "
		 "all daemons; it may include this daemon. This daemon publishes its "
		 "chunks to them and queries them for chunks that are not stored "
		 "here. An index node needs chunk_memory. cluster: the daemons with "
		 "this setting, from etcd (option cluster)."},
	{"chunks", "chunk_index_memory", SETTING_SIZE, FIELD(chunk_index_bytes),
	 .preset = "16 MiB", .zero = "off", .min = 1, .max = UINT64_C(64) << 30,
	 .module = "store",
	 .help = "Memory limit of the index if this daemon is an index node of "
		 "others: 21 bytes per chunk and daemon. It is allocated as needed. "
		 "off: this daemon is no index node."},

	{"transport", "transports", SETTING_WORDS, FIELD(transports), .preset = "auto",
	 .help = "Transports in order of preference: local, shm, verbs, tcp, ucx. "
		 "auto: all that are built in and possible with listen, in this "
		 "order."},
	{"transport", "require", SETTING_WORDS, FIELD(require), .preset = "",
	 .help = "Transports that may be used, or the class rdma. A pair of daemons "
		 "without a common one reports EREQUIRE. Empty: any transport."},
	{"transport", "ucx_library", SETTING_PATH, FIELD(ucx_library), .preset = "",
	 .module = "ucx",
	 .help = "Path of libucp. Empty: the system's libucp.so.0. UCX uses the "
		 "devices in UCX_NET_DEVICES of the daemon's environment, or the "
		 "device of listen; and the transports in UCX_TLS, or rc, dc and ud "
		 "on RDMA devices, else tcp."},
	{"transport", "tcp_listen", SETTING_TEXT, FIELD(tcp_listen), .preset = "",
	 .help = "Address of the tcp transport's data port: tcp://ADDRESS:PORT as in "
		 "listen. Empty: the address of listen and a free port. For "
		 "encryption see tcp_crypto."},
	{"transport", "tcp_streams", SETTING_COUNT, FIELD(tcp_streams), .preset = "auto",
	 .zero = "auto", .min = 1, .max = 32,
	 .help = "Data connections to each peer; the smaller value of both daemons is "
		 "used. auto: half the cores, from 1 to 8."},
	{"transport", "tcp_threads", SETTING_COUNT, FIELD(tcp_threads), .preset = "auto",
	 .zero = "auto", .min = 1, .max = THREADS_MAX,
	 .help = "Threads that serve data connections. auto: half the cores, from 1 "
		 "to 8."},
	{"transport", "tcp_crypto", SETTING_ENUM, FIELD(tcp_crypto), .preset = "auto",
	 .words = crypto_words,
	 .help = "Encryption of data connections over tcp: aes128gcm (confidentiality "
		 "and integrity) or none. The stronger setting of both daemons is "
		 "used. auto: aes128gcm, but none between loopback addresses."},
	{"transport", "verbs_rails", SETTING_TEXT, FIELD(verbs_rails), .preset = "",
	 .help = "RDMA ports of the verbs transport, in order: device, device:port, "
		 "interface or address. Empty: the port with the address of listen, "
		 "or all ports if that is a wildcard."},
	{"transport", "verbs_ack_timeout", SETTING_COUNT, FIELD(verbs_ack_timeout),
	 .preset = "14", .min = 8, .max = 22,
	 .help = "Retransmission timeout of the adapter: 4.096 us << this value (14: "
		 "67 ms)."},
	{"transport", "verbs_traffic_class", SETTING_COUNT, FIELD(verbs_traffic_class),
	 .preset = "auto", .zero = "auto", .min = 1, .max = 255,
	 .help = "Traffic class (DSCP and ECN bits) of RoCE packets. The service "
		 "level follows from it, by the port's priority map (RoCE) or the "
		 "subnet manager's QoS classes (InfiniBand). auto: the system's "
		 "default."},
	{"transport", "verbs_request_ns", SETTING_COUNT, FIELD(verbs_request_ns),
	 .preset = "150", .zero = "off", .min = 1, .max = 1000000,
	 .help = "Cost of a work request in ns. Rows that are scattered on both sides "
		 "are packed if two copies cost less. off: rows are never packed."},
	{"transport", "copy_threads", SETTING_COUNT, FIELD(copy_threads),
	 .preset = "auto", .zero = "auto", .min = 1, .max = THREADS_MAX,
	 .help = "Threads that copy engine memory. auto: half the cores, from 1 to 8."},
	{"transport", "vm_direct", SETTING_BOOL, FIELD(vm_direct), .preset = "yes",
	 .help = "Read private memory (vm) of engines of another daemon on this host "
		 "in place, if the kernel permits it and the other daemon's user owns "
		 "the process. no, or not possible: both daemons copy through a ring "
		 "buffer."},
	{"transport", "gpus", SETTING_TEXT, FIELD(gpu), .preset = "auto",
	 .help = "GPUs whose memory engines may register: auto (all GPUs of the "
		 "host), off, or a list of UUIDs and PCI ids. The driver is loaded at "
		 "the first registration."},
	{"transport", "cuda_library", SETTING_TEXT, FIELD(cuda_library),
	 .preset = "libcuda.so.1",
	 .help = "Library of the CUDA driver: a name or a path."},
	{"transport", "gpu_kernels", SETTING_TEXT, FIELD(gpu_kernels), .preset = "auto",
	 .help = "Image of GPU kernels: auto (built in), off, or the path of an image "
		 "that nvcc made of gpu/kernels.cu, and of gpu/attend.cu where rows "
		 "attend to published pages. Without kernels the GPU's copy engines "
		 "move all data."},
	{"transport", "copy_slice", SETTING_SIZE, FIELD(slice_bytes), .preset = "512 KiB",
	 .min = 4 * KIB, .max = 64 * MIB,
	 .help = "Bytes that a copy thread moves between two checks for cancellation."},
	{"transport", "max_inflight", SETTING_SIZE, FIELD(max_inflight_bytes),
	 .preset = "256 MiB", .min = 64 * KIB, .max = 1024 * GIB, .reload = true,
	 .help = "Limit of bytes in flight to one peer. Above it a room or session "
		 "has at most one operation in flight to that peer."},
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
	      "#   require = rdma              to reject anything slower\n",
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
