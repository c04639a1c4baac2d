#!/usr/bin/perl
# What sanoid itself makes of configurations: runs the init() of the sanoid given, as it is written
# there, on each directory and prints {directory: {section: settings}} or {directory: "fatal: ..."}.
#
# usage: sanoid_init.pl SANOID DEFAULTS DATASETS DIRECTORY...
# DATASETS is a file of dataset names, a line each, that are to exist. A directory is that of sanoid's
# cache, too: sanoid 2.3 reads DIRECTORY/datasets.txt, and writes one where there is none.
use strict;
use warnings;
use Config::IniFiles;
use JSON::PP;

my ($sanoid, $defaults, $datasets, @directories) = @ARGV;
our %args;
our $MINIMUM_DEFAULTS_VERSION = 2;
our ($cacheTTL, $cachedatasetspath, @cachedatasets, $zfs) = (1200);
sub checklock { 1 }
sub writelock { 1 }
sub removelock { 1 }

open my $source, '<', $sanoid or die "$sanoid: $!";
my $text = do { local $/; <$source> };
$text =~ /^(sub init \{.*?^\} # end sub init)/ms or die "no init() in $sanoid";
my $init = $1;
$init =~ s/\$MINIMUM_DEFAULTS_VERSION/\$main::MINIMUM_DEFAULTS_VERSION/g;
$init =~ s/\$args\{/\$main::args{/g;

open my $list, '<', $datasets or die "$datasets: $!";
chomp(my @known = <$list>);

# sanoid's own, whose `zfs list` prints what shows that it was asked.
$text =~ /^(sub getchilddatasets \{.*?^\})/ms or die "no getchilddatasets() in $sanoid";
my $children = $1;
$children =~ s/^sub getchilddatasets/sub children_by_cache/;
$zfs = q(printf '%s\n' - ASKED #);

# In place of its `zfs list -Hr PATH` in a shell, of which it drops the first line.
sub getchilddatasets {
    my ($path) = @_;
    if (@cachedatasets) {
        my @found = children_by_cache($path);
        return @found unless "@found" eq "ASKED\n";
    }
    return map { "$_\n" } @known[1 .. $#known] if $path eq '';
    return () if $path =~ /\s/;
    return map { "$_\n" } grep { index($_, "$path/") == 0 } @known;
}

eval "$init\n$children\n1;" or die $@;

my %answer;
for my $directory (@directories) {
    local $SIG{__WARN__} = sub { };
    ($cachedatasetspath, @cachedatasets) = "$directory/datasets.txt";
    my %config = eval { init("$directory/sanoid.conf", $defaults) };
    if ($@) {
        my $reason = $@;
        chomp $reason;
        $answer{$directory} = "fatal: $reason";
        next;
    }
    for my $settings (values %config) {
        for my $key (keys %$settings) {
            my $value = $settings->{$key};
            $settings->{$key} = ref $value ? join("\n", @$value) : defined $value ? "$value" : "";
        }
        delete $settings->{initialized};
    }
    $answer{$directory} = \%config;
}
print JSON::PP->new->latin1->canonical->encode(\%answer);
