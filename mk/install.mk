# SPDX-License-Identifier: Apache-2.0
# make install: DESTDIR is put in front of every path (packaging), PREFIX is
# where the files will be found. The units go where systemd looks under PREFIX.
DESTDIR ?=
PREFIX  ?= /usr/local
BINDIR     ?= $(PREFIX)/bin
LIBDIR     ?= $(PREFIX)/lib
INCLUDEDIR ?= $(PREFIX)/include
MANDIR     ?= $(PREFIX)/share/man
DOCDIR     ?= $(PREFIX)/share/doc/kvd
DATADIR    ?= $(PREFIX)/share/kvd
UNITDIR    ?= $(PREFIX)/lib/systemd/system
SYSUSERSDIR ?= $(PREFIX)/lib/sysusers.d
TMPFILESDIR ?= $(PREFIX)/lib/tmpfiles.d
SYSCONFDIR  ?= /etc
# completion of kvd-ctl, where each shell looks under PREFIX
BASHDIR ?= $(PREFIX)/share/bash-completion/completions
ZSHDIR  ?= $(PREFIX)/share/zsh/site-functions
FISHDIR ?= $(PREFIX)/share/fish/vendor_completions.d

D = $(DESTDIR)
PUBLIC_HEADERS := $(wildcard lib/kvd.h lib/kvd_chunk.h lib/kvd_attend.h lib/kvd_cost.h \
	proto/kvd_status.h proto/kvd_ring.h)
MAN_PAGES  := $(wildcard man/*.[1-8])
# with their folders: their links are relative
DOC_FILES  := $(wildcard README.md CHANGELOG.md CONTRIBUTING.md LICENSE docs/*.md \
	docs/*/*.md examples/*.[ch] examples/*.py)
# alerts and a board, for who scrapes daemons
DATA_FILES := prometheus/rules.yml grafana/kvd.json
FILL = sed -e 's|@BINDIR@|$(BINDIR)|g' -e 's|@PREFIX@|$(PREFIX)|g' \
	-e 's|@LIBDIR@|$(LIBDIR)|g' -e 's|@INCLUDEDIR@|$(INCLUDEDIR)|g' \
	-e 's|@VERSION@|$(VERSION)|g'

.PHONY: install uninstall
install: all ## install to DESTDIR/PREFIX
	$(Q)install -d $(D)$(BINDIR) $(D)$(UNITDIR) $(D)$(SYSUSERSDIR) $(D)$(TMPFILESDIR) \
		$(D)$(DOCDIR) $(D)$(SYSCONFDIR)/kvd
	$(Q)install -m 0755 $(PROGRAMS) $(D)$(BINDIR)
	$(Q)$(FILL) systemd/kvd@.service.in > $(D)$(UNITDIR)/kvd@.service
	$(Q)chmod 0644 $(D)$(UNITDIR)/kvd@.service
	$(Q)install -m 0644 systemd/kvd@.socket systemd/kvd.target $(D)$(UNITDIR)
	$(Q)install -m 0644 systemd/kvd.sysusers $(D)$(SYSUSERSDIR)/kvd.conf
	$(Q)install -m 0644 systemd/kvd.tmpfiles $(D)$(TMPFILESDIR)/kvd.conf
	$(Q)install -m 0644 config/kvd.conf $(D)$(SYSCONFDIR)/kvd/kvd.conf.sample
	$(Q)install -d $(D)$(BASHDIR) $(D)$(ZSHDIR) $(D)$(FISHDIR)
	$(Q)$(B)/kvd-ctl completion bash > $(D)$(BASHDIR)/kvd-ctl
	$(Q)$(B)/kvd-ctl completion zsh > $(D)$(ZSHDIR)/_kvd-ctl
	$(Q)$(B)/kvd-ctl completion fish > $(D)$(FISHDIR)/kvd-ctl.fish
	$(Q)for file in $(DOC_FILES); do \
		install -D -m 0644 $$file $(D)$(DOCDIR)/$$file; done
	$(Q)for file in $(DATA_FILES); do \
		install -D -m 0644 contrib/$$file $(D)$(DATADIR)/$$file; done
	$(Q)for page in $(MAN_PAGES); do \
		install -D -m 0644 $$page $(D)$(MANDIR)/man$${page##*.}/$${page##*/}; done
ifneq ($(LIBKVD),)
	$(Q)install -d $(D)$(LIBDIR)/pkgconfig $(D)$(INCLUDEDIR)
	$(Q)install -m 0755 $(LIBKVD) $(D)$(LIBDIR)/libkvd.so.$(VERSION)
	$(Q)ln -sf libkvd.so.$(VERSION) $(D)$(LIBDIR)/libkvd.so.$(SOVERSION)
	$(Q)ln -sf libkvd.so.$(SOVERSION) $(D)$(LIBDIR)/libkvd.so
	$(Q)install -m 0644 $(LIBKVD_A) $(D)$(LIBDIR)
	$(Q)install -m 0644 $(PUBLIC_HEADERS) $(D)$(INCLUDEDIR)
	$(Q)$(FILL) config/libkvd.pc.in > $(D)$(LIBDIR)/pkgconfig/libkvd.pc
	$(Q)chmod 0644 $(D)$(LIBDIR)/pkgconfig/libkvd.pc
endif

# the operator's own files in SYSCONFDIR/kvd stay
uninstall: ## remove what install put there
	$(Q)rm -f $(D)$(BINDIR)/kvd $(D)$(BINDIR)/kvd-ctl $(D)$(UNITDIR)/kvd@.service \
		$(D)$(UNITDIR)/kvd@.socket $(D)$(UNITDIR)/kvd.target $(D)$(SYSUSERSDIR)/kvd.conf \
		$(D)$(TMPFILESDIR)/kvd.conf $(D)$(SYSCONFDIR)/kvd/kvd.conf.sample \
		$(D)$(BASHDIR)/kvd-ctl $(D)$(ZSHDIR)/_kvd-ctl $(D)$(FISHDIR)/kvd-ctl.fish \
		$(D)$(LIBDIR)/libkvd.so $(D)$(LIBDIR)/libkvd.so.$(SOVERSION) \
		$(D)$(LIBDIR)/libkvd.so.$(VERSION) $(D)$(LIBDIR)/libkvd.a \
		$(D)$(LIBDIR)/pkgconfig/libkvd.pc \
		$(addprefix $(D)$(INCLUDEDIR)/,$(notdir $(PUBLIC_HEADERS))) \
		$(addprefix $(D)$(DOCDIR)/,$(DOC_FILES)) \
		$(addprefix $(D)$(DATADIR)/,$(DATA_FILES))
	$(Q)for page in $(MAN_PAGES); do \
		rm -f $(D)$(MANDIR)/man$${page##*.}/$${page##*/}; done
	$(Q)for dir in $(D)$(DOCDIR) $(D)$(DATADIR) $(D)$(SYSCONFDIR)/kvd; do \
		[ ! -d $$dir ] || find $$dir -depth -type d -empty -delete; done

.PHONY: docs
docs: $(B)/kvd $(B)/reference ## write the generated pages: sample, kvd.conf(5), libkvd(3), reference
	$(Q)scripts/gen-docs.sh $(B) '$(PUBLIC_HEADERS)'
